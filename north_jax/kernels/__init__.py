"""Kernels in Pallas Mosaic GPU for Hopper, each with its pure-JAX reference of the same contract."""
