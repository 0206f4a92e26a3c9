"""Algorithms: the rewards of a group in, per-token credit out. One class per file."""
