"""Many searches side by side: run each in a process of its own, read what they came to."""
