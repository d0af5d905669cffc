"""Pool of LoRA experts of one base model, the basis of the search space."""
