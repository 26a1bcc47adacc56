"""Measures where the time of a step goes, from inside the step."""

# Steps to run before measuring: TensorFlow schedules an operation by the cost of its first runs.
WARM_UP = 40

# Files of an inspection are in this folder of the --model_dir.
FOLDER = "inspect"
