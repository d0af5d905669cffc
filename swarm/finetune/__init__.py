"""Fine-tuning by gradient, the baseline of a gradient-free search."""
