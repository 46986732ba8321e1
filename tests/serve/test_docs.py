"""docs/serving.md against the code: endpoints, metrics, and a test behind every rule."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from serve.app import ENDPOINTS, OPEN_ENDPOINTS
from serve.metrics import Metrics
from tests.serve.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()


def test_every_endpoint_is_there() -> None:
    shown = set(re.findall(r"`(GET|POST) (/[^`]*)`", PAGE))
    assert shown == {(method, path) for method, path, _ in (*ENDPOINTS, *OPEN_ENDPOINTS)}


def test_every_rule_has_its_tests() -> None:
    table = PAGE.split("## What we chose")[1].split("## Starting")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text())
    }
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert named and set(named) <= defined, row


def test_every_metric_is_there() -> None:
    metrics = Metrics(ScriptedEngine([]))
    families = text_string_to_metric_families(metrics.text().decode())
    kinds = {"counter": "_total"}
    defined = {family.name + kinds.get(family.type, "") for family in families if not family.name.endswith("_created")}
    assert set(re.findall(r"`(north_\w+)", PAGE)) == defined


def test_pages_link_to_what_exists() -> None:
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "DESIGN.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
