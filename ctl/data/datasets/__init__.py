"""Datasets that come with ctl. This directory is a TFDS data_dir with one folder per dataset."""
