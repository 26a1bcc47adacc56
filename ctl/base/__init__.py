"""What knows nothing of training: files, texts, names, the terminal, TensorFlow's private names."""

__version__ = "0.1.0"
