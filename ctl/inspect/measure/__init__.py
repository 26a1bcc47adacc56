"""Where the time of a step goes, measured inside it."""
