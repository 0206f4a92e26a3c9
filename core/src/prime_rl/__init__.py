"""prime-rl: asynchronous reinforcement learning, fine-tuning and evaluation of language models."""

__version__ = "0.1.0"
