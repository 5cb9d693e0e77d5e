"""The plug-in's modules load where only vLLM's environment is: in an engine's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys

sys.modules |= dict.fromkeys({names})
import batchrun.vllm_plugin.planner, batchrun.vllm_plugin.settings, batchrun.vllm_waiting
"""
"""A module that is None cannot be imported."""


def locked(path: Path) -> set[str]:
    """The packages of a lock, by their import names as far as these are like them."""
    names = re.findall(r"^([a-zA-Z0-9_.-]+)==", path.read_text("utf-8"), re.MULTILINE)
    return {name.lower().replace("-", "_") for name in names}


def test_the_plug_in_imports_nothing_that_an_engine_environment_lacks() -> None:
    lacking = locked(ROOT / "locks" / "cpu.txt") - locked(ROOT / "batchrun/engine/engine-cpu.txt")
    lacking |= {"ruamel"}
    assert {"sqlalchemy", "typer", "pydantic_settings"} & lacking

    code = PROGRAM.format(names=sorted(lacking))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr
