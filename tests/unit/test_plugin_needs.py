"""The plug-in's modules load where only vLLM's environment is: in an engine's own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from batchrun.daemon.plugin import plugin_folder
from batchrun.home import Home

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


def test_an_engine_environment_without_batchrun_is_told_its_entry_point(tmp_path: Path) -> None:
    folder = plugin_folder(Home(tmp_path))
    plugin_folder(Home(tmp_path))

    (told,) = distributions(path=[str(folder)])
    (entry,) = told.entry_points
    declared = next(each for each in distributions() if each.name == "batchrun").entry_points
    assert entry in declared.select(group="vllm.general_plugins")
    assert (folder / "batchrun" / "vllm_waiting.py").is_file()
