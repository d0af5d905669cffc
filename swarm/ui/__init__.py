"""Web application for the searches, models, conversations and comparisons of this machine."""
