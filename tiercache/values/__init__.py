"""Frozen values that the parts of a training pass to each other. They import nothing else of ours."""
