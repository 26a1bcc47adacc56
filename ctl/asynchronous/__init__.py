"""Asynchronous training with parameter servers, without an all-reduce."""
