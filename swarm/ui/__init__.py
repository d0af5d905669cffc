"""The page in a browser: searches, models, conversations and comparisons of this machine."""
