"""Serves a model: scheduler, sampler, HTTP, weight updates. Runs any model plugin."""
