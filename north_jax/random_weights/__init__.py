"""Weights for models without a checkpoint: random, with routing and text as those of a model in use."""
