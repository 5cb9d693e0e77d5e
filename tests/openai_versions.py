"""Other versions of the `openai` client, each in a folder to put first on `PYTHONPATH`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from download_cache import download_cache

TIMEOUT_S = 240.0
NO_LONGER_NEEDED = ("distro",)
"""What clients of the 2.x series need beside what is installed for the newest."""


def openai_client(version: str) -> Path:
    """A folder with this version; most of what it needs is installed already. Made once, and kept.

    Skips the test when the registry that pip uses cannot be reached.
    """
    folder = download_cache() / "openai" / version
    if not folder.exists():
        try:
            _install(version, folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"openai {version} cannot be installed: {error}")
    return folder


def _install(version: str, folder: Path) -> None:
    """Install it. The folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=folder.parent))
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(unfinished)]
    try:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                *options,
                f"openai=={version}",
                *NO_LONGER_NEEDED,
            ],
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        if not folder.exists():
            unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
