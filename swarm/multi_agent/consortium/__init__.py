"""Inside a consortium: what is asked and read in an iteration, and what becomes of a request."""
