"""Flax model families."""
