"""Written when the package was built: what was left out of the compiled module, and why ("" for nothing)."""

LEFT_OUT = ""
