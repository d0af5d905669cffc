"""Full models instead of adapters: weights are mixed tensor by tensor."""
