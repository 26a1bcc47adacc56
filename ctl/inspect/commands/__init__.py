"""The sub-commands of ``python -m ctl.inspect``."""
