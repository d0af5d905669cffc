"""A folder of LoRA experts of one base model, as the basis of the search space."""
