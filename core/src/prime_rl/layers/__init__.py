"""Building blocks of model plugins: attention, experts, norms, and what records them."""
