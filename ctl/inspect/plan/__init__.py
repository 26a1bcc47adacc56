"""What a step moves, read from its traced graph."""
