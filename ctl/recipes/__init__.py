"""Methods of the literature on the seams of the step: one file each."""
