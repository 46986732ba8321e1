"""The server: `python -m serve` gives an OpenAI-compatible endpoint over north_jax."""
