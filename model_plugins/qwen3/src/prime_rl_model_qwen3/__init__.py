"""Qwen3 dense and mixture-of-experts models."""
