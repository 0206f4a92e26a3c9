"""Sticky least-loaded router."""
