"""Quality: what a checkpoint is worth through each backend. `python -m north_jax.quality` measures it."""
