"""Export of a result from its run folder: an adapter or a model, with its model card."""
