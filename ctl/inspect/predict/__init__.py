"""Step time and efficiency on other numbers of replicas, from a model."""
