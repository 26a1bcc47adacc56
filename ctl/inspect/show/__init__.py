"""Shows measurements as tables, pictures and files."""
