"""Fine-tuning by gradient, the rival of a search without one."""
