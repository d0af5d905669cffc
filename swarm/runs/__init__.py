"""The run folder: what a search writes, and how it is read back."""
