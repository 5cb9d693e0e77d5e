"""Each Python snippet of the README and of the page on Python runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deployment_rig import DeploymentRig

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: str) -> list[str]:
    """The Python of a page, in order: later snippets go on from earlier ones."""
    return SNIPPET.findall((ROOT / page).read_text("utf-8"))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentRig]:
    """A folder with a job file and a deployment that is up, as the snippets take for granted."""
    made = DeploymentRig(tmp_path)
    made.use_fake_engine()
    made.write_rows(["one", "two"])
    made.write_job()
    made.ask("up", "-d")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHRUN_HOME", str(made.home))
    yield made
    made.close()


async def test_the_page_on_python_runs_as_it_stands(
    rig: DeploymentRig, capsys: pytest.CaptureFixture[str]
) -> None:
    known: dict[str, Any] = {"__name__": "page"}
    for text in snippets("docs/python.md"):
        exec(compile(text, "python.md", "exec", dont_inherit=True), known)
    await known["classify"]([{"text": "Fine."}])

    assert isinstance(known["answered"], pl.DataFrame)
    assert known["answered"]["error"].null_count() == 2
    assert known["labelled"].schema["stars"] == pl.Int64
    assert known["job"].status()["state"] == "completed"
    assert "Fine." in capsys.readouterr().out


def test_the_readme_runs_as_it_stands(rig: DeploymentRig) -> None:
    known: dict[str, Any] = {"__name__": "page"}
    for text in snippets("README.md"):
        exec(compile(text, "README.md", "exec", dont_inherit=True), known)

    assert known["answered"]["response"].null_count() == 0
