"""PPO: the clipped surrogate objective, token by token."""

from prime_rl_loss_ppo.loss import PPO

__all__ = ["PPO"]
