"""Takes a result out of its run folder, as others use it: an adapter or a model, with its card."""
