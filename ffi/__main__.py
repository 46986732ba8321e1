"""`python -m ffi`: one line on what was compiled."""

from ffi import build_info

print(build_info())
