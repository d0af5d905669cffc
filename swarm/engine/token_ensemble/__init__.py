"""Token-level ensembles of whole models that share a tokenizer."""
