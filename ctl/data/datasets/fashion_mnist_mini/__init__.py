"""A class-balanced sixth of Fashion-MNIST: 10,000 training and 2,000 test images."""
