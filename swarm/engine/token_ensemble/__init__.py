"""Token-level ensembles of full models that share a tokenizer."""
