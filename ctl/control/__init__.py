"""What a loop decides between two calls: how far to go, whether to stop, whether all is well."""
