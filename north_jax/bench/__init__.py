"""Measurements: commands of `python -m north_jax.bench`, which print a table and write JSON with its provenance."""
