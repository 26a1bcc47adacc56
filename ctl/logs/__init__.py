"""Output of a run: terminal, progress bar, metrics, profiles, SVG."""
