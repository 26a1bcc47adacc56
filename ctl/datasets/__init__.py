"""Datasets that come with ctl, each prepared as a TFDS folder: this directory serves as a TFDS data_dir."""
