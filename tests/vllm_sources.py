"""The Python sources of other vLLM versions, taken out of their wheels without loading the rest.

A wheel of vLLM has over 300 MB, its Python files 13. They are read by HTTP ranges, once, into a
cache folder: `BATCHRUN_TEST_CACHE`, else `batchrun-tests` in the user's cache folder. Compiled
parts stay away; vLLM then takes its platform to be the CPU, and its scheduler needs none of them.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest
from download_cache import download_cache

READ_AHEAD_BYTES = 1 << 20
TIMEOUT_S = 60.0
MAX_FILE_BYTES = 16 << 20


class _RemoteFile(io.RawIOBase):
    """A file on an HTTP server that answers ranges."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._at = 0
        head = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(head, timeout=TIMEOUT_S) as response:
            self._size = int(response.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        wanted = {"Range": f"bytes={self._at}-{end - 1}"}
        part = urllib.request.Request(self._url, headers=wanted)
        with urllib.request.urlopen(part, timeout=TIMEOUT_S) as response:
            if response.status != 206:
                raise OSError("the registry does not answer ranges")
            data: bytes = response.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def vllm_sources(version: str) -> Path:
    """A folder to put first on `sys.path`, which then imports this vLLM. Its name is the version.

    Skips the test when the registry that pip uses cannot be reached.
    """
    folder = download_cache() / "vllm-sources" / version
    if not folder.exists():
        try:
            _fetch(version, folder)
        except (OSError, urllib.error.URLError, subprocess.SubprocessError) as error:
            pytest.skip(f"the sources of vLLM {version} cannot be fetched: {error}")
    return folder


def _fetch(version: str, folder: Path) -> None:
    """Extract the Python files. The folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=folder.parent))
    try:
        remote = io.BufferedReader(_RemoteFile(_wheel_url(version)), READ_AHEAD_BYTES)  # type: ignore[type-var]
        with zipfile.ZipFile(remote) as wheel:
            # In the order of the file, so that each range is read once.
            for member in sorted(wheel.infolist(), key=lambda info: info.header_offset):
                is_wanted = member.filename.endswith(".py") or ".dist-info/" in member.filename
                if is_wanted and member.file_size <= MAX_FILE_BYTES:
                    wheel.extract(member, unfinished)
        if not folder.exists():
            unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _wheel_url(version: str) -> str:
    """Where pip would take the wheel from, by its own settings. Raises SubprocessError."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--report=-", f"vllm=={version}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=4 * TIMEOUT_S,
    )
    url: str = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    return url
