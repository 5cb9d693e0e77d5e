"""Every attack of the manual has its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_manual_names_is_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    section = page.partition("\n## Attacks\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| .+ \| `(tests/[\w/]+\.py)::(test_\w+)` \|$", section, re.MULTILINE)

    assert len(named) == section.count("\n| ") - 1 > 20
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{path}::{name}"
