"""Detached child processes that outlive the process that started them.

A child is known by three things kept in its record: pid, a random nonce that stands in its
environment, and a hash of its arguments, and of its secret where it has one. A pid alone proves
nothing: the kernel reuses them. Neither does when it was started: that moves with the clock. The
nonce is inherited, so it also finds grandchildren whose parent was killed.
All functions here may block for a moment (`terminate` for up to its grace time plus a few seconds).

What an engine's log says: the stage of its start, and why it ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from batchrun.files import waited_for_core_s, write_atomically

NONCE_VARIABLE = "BATCHRUN_NONCE"
_NO_PID = 0
_KILL_WAIT_S = 5.0
_AGENT_WAIT_S = 30.0
"""An agent ends its engine first."""
_POLL_S = 0.05
_EXEC_WAIT_S = 5.0
_EXEC_POLL_S = 0.002
_MAX_LOG_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What is needed to know a child again."""

    pid: Annotated[int, msgspec.Meta(ge=_NO_PID)]
    nonce: str
    argv_hash: str


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    record_path: Path,
    secret: str | None = None,
    stdin: int | None = None,
) -> ProcessRecord:
    """Start `argv` in a session of its own and write its record.

    `env` is the whole environment of the child; stdout and stderr are appended to `log_path`
    (a log over 64 MiB is first renamed to `.1`). `stdin` is a descriptor; without it there is
    nothing to read.
    Raises OSError when the program cannot be run or a file cannot be written.
    """
    nonce = secrets.token_hex(16)
    # setproctitle, which engines call, would otherwise write the title over the nonce.
    child_env = {**env, NONCE_VARIABLE: nonce, "SPT_NOENV": "1"}
    record_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    if log_path.exists() and log_path.stat().st_size > _MAX_LOG_BYTES:
        log_path.replace(log_path.with_name(f"{log_path.name}.1"))
    # Written before the start too: should we be killed in between, the nonce still finds the child.
    record = ProcessRecord(_NO_PID, nonce, hash_argv(argv, secret))
    _write_record(record, record_path)
    try:
        pid = _spawn_detached(argv, child_env, log_path, stdin)
    except OSError:
        record_path.unlink(missing_ok=True)
        raise
    record = replace(record, pid=pid)
    _wait_for_nonce(record)
    _write_record(record, record_path)
    return record


def cut_log(log_path: Path) -> None:
    """Move what a log over 64 MiB holds to `.1`, while its writer goes on: it appends."""
    if log_path.exists() and log_path.stat().st_size > _MAX_LOG_BYTES:
        shutil.copyfile(log_path, log_path.with_name(f"{log_path.name}.1"))
        os.truncate(log_path, 0)


def adopt(
    record_path: Path, argv: Sequence[str], secret: str | None = None
) -> ProcessRecord | None:
    """The record at `record_path` if its process lives and was started with this very `argv`, and
    this `secret` in its environment."""
    record = read_record(record_path)
    if record is None or record.argv_hash != hash_argv(argv, secret) or not is_alive(record):
        return None
    return record


def read_record(record_path: Path) -> ProcessRecord | None:
    """The record in a file; None when there is no file or it is not a record."""
    try:
        return msgspec.json.decode(record_path.read_bytes(), type=ProcessRecord)
    except (FileNotFoundError, UnicodeDecodeError, msgspec.DecodeError):
        return None


def is_alive(record: ProcessRecord) -> bool:
    """Whether this very process runs. A zombie is dead, and is reaped if it is ours."""
    if record.pid == _NO_PID:
        return False
    _reap(record.pid)
    try:
        return _belongs(psutil.Process(record.pid), record)
    except psutil.Error:
        return False


def was_killed(record: ProcessRecord) -> bool | None:
    """Whether SIGKILL ended the process, as far as that is known: of a child that nobody has reaped
    yet. None while it runs."""
    try:
        ended = os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None if is_alive(record) else False
    if ended is None:
        return None
    return (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGKILL)


def terminate(record: ProcessRecord, grace_s: float) -> None:
    """End the process and its descendants: SIGTERM, then SIGKILL after `grace_s`.

    Also ends descendants that a killed process left behind. Does nothing if none is alive.
    """
    family = find_family(record)
    _signal_all(family, signal.SIGTERM)
    _wait_gone(record, family, grace_s)
    survivors = find_family(record)
    _signal_all(survivors, signal.SIGKILL)
    _wait_gone(record, survivors, _KILL_WAIT_S)


def stop_recorded(record_path: Path, grace_s: float = 10.0) -> bool:
    """End what a record names, with its descendants; returns whether any of it was alive."""
    record = read_record(record_path)
    if record is None:
        return False
    was_running = bool(find_family(record))
    terminate(record, grace_s)
    record_path.unlink(missing_ok=True)
    return was_running


def signal_recorded(record_path: Path, signal_number: int) -> bool:
    """Signal what a record names, and nothing that it has started; whether it was alive."""
    record = read_record(record_path)
    if record is None or not is_alive(record):
        return False
    with suppress(ProcessLookupError):
        os.kill(record.pid, signal_number)
    return True


def stop_agent(record_path: Path) -> bool:
    """End an agent at once, which drains on SIGTERM alone; returns whether any of it was alive. Of
    one that hangs its guard is left to end the engine."""
    was_alive = signal_recorded(record_path, signal.SIGINT)
    record, deadline_s = read_record(record_path), time.monotonic() + _AGENT_WAIT_S
    while record is not None and is_alive(record) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    kill_alone(record_path)
    return stop_recorded(record_path, _AGENT_WAIT_S) or was_alive


def kill_alone(record_path: Path) -> None:
    """SIGKILL to what a record names, and to nothing that it has started."""
    record = read_record(record_path)
    if record is not None and is_alive(record):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(record.pid)
            _signal_all([process], signal.SIGKILL)
            _wait_gone(record, [process], _KILL_WAIT_S)


STARVED_SHARE = 0.25
"""A process that waited for a core for so much of the time is late, on a machine that is short of
CPU."""
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


_QUESTION = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def answers(record: ProcessRecord, connect: Connect, *, within_s: float) -> bool:
    """Whether a process takes a connection and a question and says anything; one that waits for a
    core counts as if."""
    waited_s = waited_for_core_s(record.pid)
    writer = None
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await connect()
            writer.write(_QUESTION)
            return bool(await reader.read(1))
    except OSError:
        starved_s = waited_for_core_s(record.pid) - waited_s
        return starved_s >= STARVED_SHARE * within_s
    finally:
        if writer is not None:
            writer.close()


def find_family(record: ProcessRecord) -> list[psutil.Process]:
    """Live processes of this user that are the child itself or carry its nonce."""
    return [process for process in psutil.process_iter() if _belongs(process, record)]


def num_moved_mib(record: ProcessRecord) -> int:
    """What the child and its descendants have read and written; of a download, its file."""
    num_bytes = 0
    for process in find_family(record):
        with suppress(psutil.Error):
            moved = process.io_counters()
            num_bytes += moved.read_chars + moved.write_chars
    return num_bytes >> 20


def hash_argv(argv: Sequence[str], secret: str | None = None) -> str:
    """A hash of an argument list and a secret; equal ones give equal hashes."""
    content = [*argv] if secret is None else [*argv, secret]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _spawn_detached(
    argv: Sequence[str], env: Mapping[str, str], log_path: Path, stdin: int | None
) -> int:
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawnp(
        argv[0],
        list(argv),
        env,
        file_actions=[
            nothing if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.fspath(log_path), log_flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT],
    )


def _wait_for_nonce(record: ProcessRecord) -> None:
    """Wait until the child can be recognised: the kernel lets the parent of a `posix_spawn` go on
    before the child's new environment can be read."""
    deadline_s = time.monotonic() + _EXEC_WAIT_S
    while time.monotonic() < deadline_s:
        try:
            process = psutil.Process(record.pid)
            if not _runs(process) or _belongs(process, record):
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(_EXEC_POLL_S)


def _belongs(process: psutil.Process, record: ProcessRecord) -> bool:
    try:
        if process.uids().real != os.getuid() or not _runs(process):
            return False
        return process.environ().get(NONCE_VARIABLE) == record.nonce
    except psutil.Error:
        return False


def _runs(process: psutil.Process) -> bool:
    return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


def _signal_all(processes: Sequence[psutil.Process], signal_number: int) -> None:
    for process in processes:
        try:
            process.send_signal(signal_number)
        except psutil.NoSuchProcess:
            continue


def _wait_gone(record: ProcessRecord, family: Sequence[psutil.Process], wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    while any(_belongs(process, record) for process in family):
        if time.monotonic() >= deadline_s:
            return
        time.sleep(_POLL_S)
    _reap(record.pid)


def _reap(pid: int) -> None:
    if pid == _NO_PID:
        return
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _write_record(record: ProcessRecord, record_path: Path) -> None:
    write_atomically(record_path, json.dumps(asdict(record)).encode(), mode=0o600)


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

    @property
    def position(self) -> int:
        """Up to which byte the log was read: another one whenever something was written."""
        return self._offset

    def read_new_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        self._notice_cut()
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
        size = self._notice_cut()
        with self.path.open("rb") as file:
            file.seek(max(self._start, size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")

    def _notice_cut(self) -> int:
        """The log's size; one that was cut is read from its beginning."""
        size = self.path.stat().st_size
        if size < self._offset:
            self._start = self._offset = 0
        return size


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
