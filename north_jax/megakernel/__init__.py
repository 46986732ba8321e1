"""Decode as task lists: one persistent kernel runs many steps of the whole model.

`abi` is the contract with C++ and CUDA, `build` makes the lists, `checker` proves them, `timing` predicts them, and
`decoder` runs them. DESIGN.md, "The megakernel", is the map.
"""
