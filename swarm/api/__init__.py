"""What Python code and notebooks use: swarm.search, swarm.evaluate and what they give back."""
