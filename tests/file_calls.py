"""What a process asks of its files: counted, made to fail, or recorded, by `file_calls.c`."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
HAS_COMPILER = shutil.which("cc") is not None
KINDS: Mapping[str, int] = {
    **{"open": 1, "write": 2, "sync": 4, "rename": 8},
    **{"link": 16, "mkdir": 32, "unlink": 64, "cut": 128},
}
ROOT, LOG = "FILE_CALLS_ROOT", "FILE_CALLS_LOG"


@contextmanager
def largest_file_bytes(num_bytes: int) -> Iterator[None]:
    """No file of this process grows longer, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def build(folder: Path) -> Path:
    """The library, made in `folder`."""
    made = folder / "file_calls.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True)
    return made


def environment(library: Path, *, root: Path, log: Path | None = None) -> dict[str, str]:
    """What a process starts with whose calls on files below `root` are to be seen."""
    env = {**os.environ, "LD_PRELOAD": str(library), ROOT: str(root)}
    return env if log is None else {**env, LOG: str(log)}


class FileCalls:
    """The library in this process, which was started with `environment`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.file_calls_mark.argtypes = [ctypes.c_char_p]
        self._library.file_calls_fail.argtypes = [
            *(ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int)
        ]

    def fail(self, kind: str, number: int, error: int, *, for_good: bool = False) -> None:
        """Let call `number` (from 1; 0: none) of this kind fail, and with `for_good` all after it;
        counts calls of this kind anew."""
        self._library.file_calls_fail(KINDS[kind], number, error, for_good)

    def let(self) -> None:
        """From now on nothing fails, nor is it counted."""
        self._library.file_calls_fail(0, 0, 0, 0)

    @property
    def num_seen(self) -> int:
        """Calls that were counted."""
        return int(self._library.file_calls_seen())

    @property
    def num_failed(self) -> int:
        """Of these, the calls that failed."""
        return int(self._library.file_calls_failed())

    def record(self) -> None:
        """From now on the log holds every call that changes something."""
        self._library.file_calls_record(1)

    def mark(self, text: str) -> None:
        """Leave a line in the log."""
        self._library.file_calls_mark(text.encode())


@dataclass(frozen=True, slots=True)
class FileCall:
    """A call that did what it was to do, or a mark.

    `what`: create, mkdir, write, cut, sync, rename, link, unlink, mark. `node` is the inode, where
    the call names one; of a mark, `path` is the text.
    """

    what: str
    node: int
    at: int
    content: bytes
    path: str
    other: str


def read_calls(log: Path) -> Iterator[FileCall]:
    """What a log holds, in its order."""
    with log.open("rb") as file:
        while head := file.readline():
            what, node, at, size, path, other = head.decode().rstrip("\n").split("\t")
            yield FileCall(what, int(node), int(at), file.read(int(size)), path, other)
