"""Looks for what would stop a job, or make it slow, before the job is started."""
