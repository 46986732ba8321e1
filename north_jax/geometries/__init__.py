"""Models' configurations, without weights."""

from __future__ import annotations

from pathlib import Path

NORTH = Path(__file__).parent / "north_mini_code.json"
"""North Mini Code's config.json."""
