"""What an engine's log says: the stage of its start, and why it ended."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_MAX_LINE_CHARS = 400

_STAGES = (
    ("non-default args", "reading the model's configuration"),
    ("Resolved architecture", "starting the engine core"),
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Starting to load model", "loading weights"),
    ("Loading weights took", "weights loaded"),
    ("torch.compile", "compiling the model"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("for KV cache", "allocating KV cache"),
    ("KV cache size", "allocating KV cache"),
    ("init engine (profile", "starting the API server"),
    ("Starting vLLM", "starting the API server"),
    ("Application startup complete", "ready"),
)
_WEIGHTS = re.compile(r"Loading .*checkpoint shards:\s+(\d+)% Completed")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_VLLM_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?:: ?(.*))?$")
_VALIDATION_ERROR = re.compile(r"ValidationError: \d+ validation errors? for \w+$")
_NOISE = re.compile(
    r"^(Traceback |  |\t|\^|INFO:|Process \w|During handling|The above exception|Exception ignored"
    r"|nanobind|\w*:?\s*\d+%\|)|it/s\]|% Completed"
)
_OURS = re.compile(r"^batchrun\.errors\.\w+: ")
_EMPTY_CAUSES = ("See root cause above", "See stack trace", "initialization failed due to")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|not enough memory"
    r"|less than desired (CPU|GPU) memory|No available memory for the cache blocks"
    r"|less than requested memory for kv|larger than the available KV cache memory",
    re.IGNORECASE,
)


def find_stage(line: str) -> str | None:
    """The stage that one log line announces; None for the many that announce none."""
    progress = _WEIGHTS.search(line)
    if progress:
        return f"loading weights {progress[1]} %"
    return next((stage for marker, stage in _STAGES if marker in line), None)


def find_last_useful_line(text: str) -> str:
    """The line of a log that best says why the program ended; "" when there is none.

    Prefers the last exception that names a cause, then the last line that is neither blank, nor
    a traceback frame, nor a progress bar. batchrun's own errors stand without their class.
    """
    lines = _join_validation_errors([_clean(line) for line in text.splitlines()])
    errors = [line for line in lines if _EXCEPTION.match(line)]
    causes = [line for line in errors if not any(phrase in line for phrase in _EMPTY_CAUSES)]
    useful = causes or errors or [line for line in lines if line and not _NOISE.search(line)]
    return _OURS.sub("", useful[-1].strip())[:_MAX_LINE_CHARS] if useful else ""


def is_out_of_memory(line: str) -> bool:
    """Whether a line of a log says that memory, of the GPU or the machine, ran out."""
    return _OUT_OF_MEMORY.search(line) is not None


class LogFollower:
    """Reads what was appended to a log since it was made. Blocking, but never for long."""

    def __init__(self, path: Path) -> None:
        """Start at the present end of the file, which need not exist yet."""
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0
        self._offset = self._start
        self._rest = ""

    def read_new_lines(self) -> list[str]:
        """Whole lines appended since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(_TAIL_BYTES)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        return lines

    def read_tail(self) -> str:
        """The end of what was appended since the follower was made."""
        if not self.path.exists():
            return ""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(self._start, size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")


def _join_validation_errors(lines: list[str]) -> list[str]:
    """Pydantic says only "1 validation error for X" on the first line; the cause is on the next."""
    joined: list[str] = []
    for line in lines:
        if joined and _VALIDATION_ERROR.search(joined[-1]):
            joined[-1] = f"{joined[-1]}: {line.strip()}"
        else:
            joined.append(line)
    return joined


def _clean(line: str) -> str:
    return _VLLM_PREFIX.sub("", _ANSI.sub("", line).rsplit("\r", 1)[-1]).rstrip()
