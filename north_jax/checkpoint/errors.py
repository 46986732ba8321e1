"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked; the message names the file or tensor at fault."""


def enumerate_names(names: list[str], limit: int = 8) -> str:
    """The first `limit` names, joined, and how many more there are."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
