"""Reads from the traced graph of a step what the step moves between replicas."""
