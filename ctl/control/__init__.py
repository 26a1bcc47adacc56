"""Decisions of a loop between two calls: number of steps, stopping, divergence."""
