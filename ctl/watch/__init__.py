"""The watchdog: ends a worker whose collective does not return, and says who was where."""
