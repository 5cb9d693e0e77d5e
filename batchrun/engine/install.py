"""Building the engine's own environment: vLLM apart from batchrun, from our lock."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path

from batchrun.errors import EngineError
from batchrun.types import ProgressSink

GPU_REQUIREMENT = "vllm==0.32.0"
_CPU_LOCK = "engine-cpu.txt"
_FETCHING = re.compile(
    r"^(Collecting|Processing|Requirement already satisfied:) (?P<name>[^\s=<>(]+)"
)


def install_engine(target: Path, *, cpu: bool, progress: ProgressSink) -> Path:
    """Make a virtual environment at `target` with vLLM in it; returns its Python.

    `cpu` takes the CPU build from the packaged lock, else the GPU build. An environment that is
    there already is brought up to date. Blocking, for minutes.
    Raises EngineError with pip's last line.
    """
    python = target / "bin" / "python"
    progress("creating the environment", 0, 0)
    _run([sys.executable, "-m", "venv", str(target)], target)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not cpu:
        _run([*pip, GPU_REQUIREMENT], target, progress=progress)
        return python
    with as_file(files("batchrun.engine") / _CPU_LOCK) as lock:
        total = count_requirements(lock.read_text().splitlines())
        _run([*pip, "--no-deps", "-r", str(lock)], target, progress=progress, total=total)
    return python


def count_requirements(lines: Iterable[str]) -> int:
    """How many packages a lock file names."""
    return sum(1 for line in lines if line.strip() and line.strip()[0] not in "#-")


def _run(
    argv: list[str], target: Path, *, progress: ProgressSink | None = None, total: int = 0
) -> None:
    try:
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise EngineError(f"the engine could not be installed in {target}: {error}") from error
    with child:
        last_line = _follow(child.stdout or (), progress, total)
    if child.returncode != 0:
        raise EngineError(f"the engine could not be installed in {target}: {last_line}")


def _follow(output: Iterable[str], progress: ProgressSink | None, total: int) -> str:
    """Report each package that pip turns to; returns the last line that says something."""
    done = 0
    last_line = "no output"
    for line in output:
        last_line = line.strip() or last_line
        found = _FETCHING.match(line)
        if found:
            done += 1
        if progress is not None and found:
            progress(f"fetching {found['name']}", done, total)
        if progress is not None and line.startswith("Installing collected packages"):
            progress("installing", total, total)
    return last_line
