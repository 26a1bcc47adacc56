"""Sees through the all-reduce: what moved, how long it took, who was late, where it hangs."""
