"""Models that answer together in text: Mixture of Agents and consortium."""
