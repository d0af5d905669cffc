"""The run folder: files that a search writes, and their readers."""
