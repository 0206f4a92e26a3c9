"""Weights as safetensors files in a shared directory."""
