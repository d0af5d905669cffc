"""Model names of the command line and of configurations, resolved to models."""
