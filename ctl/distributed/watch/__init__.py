"""The watchdog ends a worker whose collective does not return, and reports where others were."""
