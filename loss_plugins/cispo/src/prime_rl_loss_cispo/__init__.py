"""CISPO: policy gradient with clipped importance ratios as constant weights."""

from prime_rl_loss_cispo.loss import CISPO

__all__ = ["CISPO"]
