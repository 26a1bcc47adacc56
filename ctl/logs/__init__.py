"""What a run shows and records: the terminal, the progress bar, metrics, profiles, SVG."""
