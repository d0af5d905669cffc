"""The search loop: ask the optimizer, evaluate positions, tell it their utilities."""
