"""Command lines: parsing, groups of flags, and checks before TensorFlow is loaded."""
