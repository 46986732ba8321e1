"""Measurements: modules to run, which print a table and write JSON with device, versions, commit and command."""
