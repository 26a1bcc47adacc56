"""Decisions of a loop between two calls: how many steps to run, when to stop, what is lost."""
