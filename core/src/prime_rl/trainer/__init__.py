"""The trainer: forward, loss, backward, step, checkpoint, publish weights."""
