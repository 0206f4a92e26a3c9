"""Ranks: process groups, sharding, and the few collectives the trainer needs."""
