"""IcePop: policy gradient that drops tokens outside a band of importance ratios."""

from prime_rl_loss_icepop.loss import IcePop

__all__ = ["IcePop"]
