"""Predicts how long a step of a schedule takes on a GPU, from measurements of an experiment with the same structure.

`machine` holds the constants, `translate` turns descriptors into what is streamed and waited for, `simulate` runs that,
`predict` scales it to a whole model; `calibration` compares it with what was measured, `search` uses it.
"""
