"""Picks tasks, runs episodes, groups them, scores them, packs batches, drives weight updates."""
