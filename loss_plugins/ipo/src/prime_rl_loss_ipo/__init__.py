"""IPO: policy gradient with a probability-difference mask."""
