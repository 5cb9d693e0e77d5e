"""Ends an engine whose agent is gone, and keeps two agents from running one engine.

A process of its own, in a session of its own: it waits for the end of a pipe that the agent alone
holds open, which comes however the agent dies. Then it ends everything that carries the engine's
nonce. While it lives it holds a lock, so that the next agent starts the engine only after that. An
agent that stands still, as its pipe tells, is ended first: whoever keeps agents starts another.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from batchrun.engine import process
from batchrun.errors import EngineError
from batchrun.files import try_lock

READY = b"ready\n"
READY_WAIT_S = 30.0
"""Longer than it takes to end an engine."""
GRACE_S = 2.0
SECOND_LOOK_S = 0.5
"""A process that was just being started shows its nonce after this at the latest."""
RESTART_S = 0.2
POLL_S = 0.1
BEAT_S = 1.0
HUNG_S = 180.0
"""An agent that stands still for so long hangs. Time in which the guard was stopped too does not
count."""


class Guard:
    """The guard of the engine that the record at `record_path` names. This process is ended where
    `watch` stands still for `hung_s`."""

    def __init__(self, record_path: Path, hung_s: float = math.inf) -> None:
        self._record_path, self._hung_s = record_path, hung_s
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when an engine may be started. Raises EngineError when another agent has it."""
        program = [sys.executable, "-P", "-m", "batchrun.engine.agent.guard"]
        program += [str(self._record_path), str(self._hung_s)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *program, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(READY_WAIT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            await self.close()
            line = b""
        if line != READY:
            raise EngineError(
                f"another agent runs the engine of {self._record_path}; end it, or give this one "
                "another --name or --home"
            )

    async def watch(self) -> None:
        """Replace the guard when it dies, for ever. Raises EngineError as `start` does."""
        while self._process is not None:
            await self._beat_until_ended(self._process)
            await asyncio.sleep(RESTART_S)
            await self.start()

    async def _beat_until_ended(self, guard: asyncio.subprocess.Process) -> None:
        ended = asyncio.create_task(guard.wait())
        try:
            while not ended.done():
                if guard.stdin is not None and not guard.stdin.is_closing():
                    guard.stdin.write(b".")
                await asyncio.wait([ended], timeout=BEAT_S)
        finally:
            ended.cancel()

    async def close(self) -> None:
        """Let the guard end what is left of the engine, and itself."""
        guard, self._process = self._process, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(READY_WAIT_S):
                    await guard.wait()


def end_engine(record_path: Path) -> None:
    """End the engine that a record names, with all its processes, within seconds."""
    record = process.read_record(record_path)
    if record is None:
        return
    process.terminate(record, GRACE_S)
    time.sleep(SECOND_LOOK_S)
    process.terminate(record, GRACE_S)
    if process.read_record(record_path) == record:
        record_path.unlink(missing_ok=True)


def wait_for_end(hung_s: float) -> bool:
    """Returns once standard input has ended, with True once nothing has come for `hung_s`."""
    stood_s, looked_s = 0.0, time.monotonic()
    while stood_s < hung_s:
        if select.select([0], [], [], BEAT_S)[0]:
            if not os.read(0, 1 << 16):
                return False
            stood_s = 0.0
        now_s = time.monotonic()
        stood_s += min(now_s - looked_s, 2 * BEAT_S)
        looked_s = now_s
    return True


def main(arguments: list[str]) -> int:
    """Guard until standard input ends. The first process of a container cannot be ended."""
    agent, given_s = os.getppid(), float(arguments[1]) if len(arguments) > 1 else math.inf
    hung_s = math.inf if agent == 1 else given_s
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    record_path = Path(arguments[0])
    record_path.parent.mkdir(parents=True, exist_ok=True)
    with record_path.with_suffix(".lock").open("w") as lock:
        while not try_lock(lock.fileno()):
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                return 0
        with suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), READY)
        if wait_for_end(hung_s) and os.getppid() == agent:
            os.kill(agent, signal.SIGKILL)
        end_engine(record_path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
