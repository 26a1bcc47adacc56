"""Asynchronous training with parameter servers: no all-reduce, no worker waits for another."""
