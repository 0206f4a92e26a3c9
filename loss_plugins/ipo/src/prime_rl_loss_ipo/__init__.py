"""IPO: policy gradient with a probability-difference mask."""

from prime_rl_loss_ipo.loss import IPO

__all__ = ["IPO"]
