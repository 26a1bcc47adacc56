"""Datasets that come with ctl, each as a TFDS folder: this directory serves as a TFDS data_dir."""
