"""Devices, replicas and workers: strategies, the share of a replica, lost and late workers."""
