"""Command lines: parsing, the groups of flags, what is checked before TensorFlow is loaded."""
