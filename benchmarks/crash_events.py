"""What else may happen to a deployment that lives: parts stop, replies are spoilt, what a process
needs runs out, the clock jumps. Part of `python -m benchmarks.crash`.

Jobs run on an engine behind a proxy. A second engine, which nothing is done to, serves calls all
the time; none of its calls may be lost, but those that a stopped gateway holds.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import requests

from batchrun.control.submitting import view_jobs
from batchrun.errors import BatchrunError
from batchrun.types import JobState
from benchmarks.crash_account import check_executions, check_home, read_commits, read_executions
from benchmarks.crash_rig import (
    END_WAIT_S,
    LATENCY_S,
    RULES,
    SHORT_ROWS,
    WINDOW_ROWS,
    Episode,
    FailpointServer,
    StatusWatcher,
)
from benchmarks.deployment import free_port, wait_until
from benchmarks.records import Bar, Record

STEADY = "steady"
"""The model of the engine that nothing is done to."""
CALL_WAIT_S = 5.0
TTFT_BOUND_S = 1.0
CALL_PAUSE_S = 0.1
SHORTEST_S, LONGEST_S = 1.0, 60.0
BOUNDS_S = {"daemon": 10.0, "worker": 5.0, "engine": 30.0}
"""A part that stands for so long is noticed within twice that."""
GATEWAY_PARTS = frozenset({"worker"})
SPOILT = ("delay", "cut", "double", "garbage")
EVENTS = (
    *(("stop", part) for part in BOUNDS_S),
    *(("spoil", how) for how in SPOILT),
    *(("starve", what) for what in ("files", "disk", "memory", "threads")),
    ("jump", "clock"),
)
ROWS_BETWEEN = 4
"""So many results are committed before the next event."""
SPARE_FILES, SPARE_BYTES = 3, 1 << 20
NO_ROOT = (
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *("--inh-caps=+dac_override,+fowner", "--ambient-caps=+dac_override,+fowner"),
)
"""Limits of threads do not hold for root."""
MOST_THREADS = 300
HOG = """
import threading, time
threading.stack_size(1 << 16)
try:
    while True: threading.Thread(target=time.sleep, args=(600,)).start()
except RuntimeError:
    print("all are taken", flush=True)
"""
MAX_JUMP_S = 7_200.0


@dataclass(slots=True)
class Event:
    """What was done to what for `lasted_s`. Where a part stood for longer than its bound,
    `noticed_s` is when that was seen; None: never, or it need not be. `has_ended`: it did."""

    action: str
    target: str
    lasted_s: float
    at: float = 0.0
    noticed_s: float | None = None
    is_due: bool = False
    has_ended: bool = False

    @property
    def is_missed(self) -> bool:
        """Whether it was to be noticed, and was not in time."""
        limit_s = 2 * BOUNDS_S.get(self.target, math.inf)
        return self.is_due and (self.noticed_s is None or self.noticed_s > limit_s)


def plan_events(
    rng: random.Random, num_events: int, targets: Sequence[str] | None = None
) -> list[Event]:
    """Each kind equally often, in a random order; short and long ones, by the logarithm."""
    wanted = [kind for kind in EVENTS if targets is None or kind[1] in targets]
    kinds = [wanted[index % len(wanted)] for index in range(num_events)]
    rng.shuffle(kinds)
    low, high = math.log(SHORTEST_S), math.log(LONGEST_S)
    return [Event(*kind, math.exp(rng.uniform(low, high))) for kind in kinds]


class Proxy:
    """Passes bytes between `port` and an engine's port; replies are spoilt as `how` says."""

    def __init__(self, port: int, engine_port: int, rng: random.Random) -> None:
        self.how = ""
        self._engine_port = engine_port
        self._rng = rng
        self._server = socket.create_server(("127.0.0.1", port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                threading.Thread(target=self._join, args=(caller,), daemon=True).start()

    def _join(self, caller: socket.socket) -> None:
        address = ("127.0.0.1", self._engine_port)
        with caller, suppress(OSError), socket.create_connection(address) as engine:
            back = threading.Thread(target=self._pass, args=(engine, caller), daemon=True)
            back.start()
            while piece := caller.recv(1 << 16):
                engine.sendall(piece)
            engine.shutdown(socket.SHUT_WR)
            back.join()

    def _pass(self, engine: socket.socket, caller: socket.socket) -> None:
        with suppress(OSError):
            while piece := engine.recv(1 << 16):
                caller.sendall(self._spoil(piece))
        for each in (engine, caller):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _spoil(self, piece: bytes) -> bytes:
        how = self.how
        if how == "delay":
            time.sleep(self._rng.uniform(0.2, 3.0))
        elif how == "double":
            return piece * 2
        elif how == "garbage":
            return self._rng.randbytes(len(piece))
        elif how == "cut" and self._rng.random() < 0.5:
            raise ConnectionAbortedError
        return piece


class Caller:
    """Calls the steady model again and again, in a thread; `calls` are when each began, and whether
    it was answered in time."""

    def __init__(self, url: str) -> None:
        self.calls: list[tuple[float, bool]] = []
        self._url = f"{url}/v1/chat/completions"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make no more calls."""
        self._is_over.set()
        self._thread.join()

    def attainment(self, spared: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """(calls, those answered in time), without calls that began within these spans."""
        counted = [
            is_well
            for at, is_well in self.calls
            if not any(begin - CALL_WAIT_S <= at <= end for begin, end in spared)
        ]
        return len(counted), sum(counted)

    def _run(self) -> None:
        while not self._is_over.wait(CALL_PAUSE_S):
            at = time.time()
            self.calls.append((at, self._call(f"call {len(self.calls)}")))

    def _call(self, text: str) -> bool:
        messages, began_s = [{"role": "user", "content": text}], time.monotonic()
        body: dict[str, Any] = {"model": STEADY, "stream": True, "max_tokens": 4}
        with (
            suppress(requests.RequestException),
            requests.post(
                self._url, json=body | {"messages": messages}, stream=True, timeout=CALL_WAIT_S
            ) as reply,
        ):
            lines = reply.iter_lines()
            first, ttft_s = next(lines, b""), time.monotonic() - began_s
            is_whole = b"data: [DONE]" in lines
            return first.startswith(b"data:") and is_whole and ttft_s <= TTFT_BOUND_S
        return False


class EventEpisode(Episode):
    """Events one after the other while jobs and calls come and go; ends early when a promise is
    broken. After `run` also: the events, and what came of the calls."""

    def __init__(
        self, folder: Path, rng: random.Random, events: Sequence[Event], store_url: str | None
    ) -> None:
        super().__init__(folder, rng)
        self._store_url = store_url
        self.points = FailpointServer(folder, rng)
        self.executions = self.commits = pl.DataFrame()
        self.events: list[Event] = []
        self.num_calls = self.num_met = 0
        self.all_calls = self.all_met = 0
        self._planned = events
        self._clock = folder / "clock"
        self._proxy: Proxy | None = None
        self._caller: Caller | None = None

    def run(self) -> None:
        """As every episode; rows may run again, but not once their results are committed."""
        super().run()
        self.points.close()
        self.executions = read_executions(self.deployment.executions_path)
        self.commits = read_commits(self.deployment)
        # Beside a clock that jumps nobody can tell what came first.
        if not self.problems and not any(event.target == "clock" for event in self.events):
            self.problems += check_executions(None, self.executions, self.commits)

    def _start(self, exits: ExitStack) -> None:
        here, proxy_port, port = self.deployment, free_port(), free_port()
        here.failpoints = f"{self.points.spec},clock={self._clock}"
        if any(event.target == "threads" for event in self._planned):
            user = NO_ROOT if os.getuid() == 0 else ()
            here.user = (*user, "prlimit", f"--nproc={_num_threads() + MOST_THREADS}")
        here.use_fake_engine(LATENCY_S, rules=RULES)
        config = here.folder / "batchrun.yaml"
        document: dict[str, Any] = json.loads(config.read_text())
        document["engines"][0] |= {"name": "0", "url": f"http://127.0.0.1:{proxy_port}"}
        command = [sys.executable, "-m", "batchrun.engine.fake", f"--port={port}"]
        command += [f"--model={STEADY}", "--tokens-per-s=50"]
        document["engines"].append({"name": STEADY, "command": command, "port": port})
        if self._store_url is not None:
            document["store"] = self._store_url
        document |= {"window": {"requests": WINDOW_ROWS}, "gateway_workers": 2}
        config.write_text(json.dumps(document))
        self._proxy = Proxy(proxy_port, here.engine_port, self._rng)
        exits.callback(self._proxy.close)
        here.start()
        wait_until(self._serves_steady, "the steady engine")
        self._caller = Caller(here.url)
        exits.callback(self._caller.stop)

    def _serves_steady(self) -> bool:
        with suppress(requests.RequestException):
            return STEADY in requests.get(f"{self.deployment.url}/v1/models", timeout=5).text
        return False

    def _write(self, num_rows: int, more: str = "") -> Path:
        return super()._write(num_rows, f"model: fake\nretries: 100\n{more}")

    def _work(self, watcher: StatusWatcher) -> None:
        for event in self._planned:
            self._go_on()
            is_seen, daemon = self._look_at(event), self.deployment.pid_of("daemon")
            event.at = time.time()
            with self._happening(event):
                self._watch(event, is_seen)
            self.events.append(event)
            if event.action == "starve" and not self.deployment.lives(daemon):
                event.has_ended = True
                self.deployment.start()
            self.problems += check_home(self.deployment)
            if self.problems or watcher.problems:
                break

    def _go_on(self) -> None:
        """As an operator does: jobs that paused go on; there are always some, and rows that end."""
        num_rows = len(read_commits(self.deployment)) + ROWS_BETWEEN

        def are_running() -> bool:
            with suppress(BatchrunError):
                for job in self._live():
                    if job.state is JobState.PAUSED:
                        self.deployment.client.post(f"/jobs/{job.id}/resume")
                while len(self._live()) < 2:
                    self.deployment.submit(self._write(4 * SHORT_ROWS))
            return len(read_commits(self.deployment)) >= num_rows

        wait_until(are_running, "rows to end again: the jobs are stuck", END_WAIT_S, 0.25)

    def _have_ended(self) -> bool:
        with suppress(BatchrunError):
            for job in self._live():
                if job.state is JobState.PAUSED:
                    self.deployment.client.post(f"/jobs/{job.id}/resume")
        return super()._have_ended()

    @contextmanager
    def _happening(self, event: Event) -> Iterator[None]:
        assert self._proxy is not None
        if event.action == "stop":
            with self._stopped(event):
                yield
        elif event.action == "spoil":
            self._proxy.how = event.target
            yield
            self._proxy.how = ""
        elif event.target == "threads":
            command = [*self.deployment.user, sys.executable, "-I", "-S", "-c", HOG]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as hog:
                assert hog.stdout is not None and hog.stdout.readline()
                yield
                hog.kill()
        elif event.target in {"files", "memory"}:
            with self._limited(event.target):
                yield
        elif event.target == "disk":
            self.points.is_disk_full = True
            yield
            self.points.is_disk_full = False
        else:
            self._clock.write_text(str(self._rng.uniform(-MAX_JUMP_S, MAX_JUMP_S)))
            yield
            self._clock.unlink()

    @contextmanager
    def _stopped(self, event: Event) -> Iterator[None]:
        pid = self.deployment.pid_of(event.target)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        """The daemon may have hardly more than it has."""
        pid = self.deployment.pid_of("daemon")
        daemon = psutil.Process(pid)
        kind, limit = {
            "files": (resource.RLIMIT_NOFILE, daemon.num_fds() + SPARE_FILES),
            "memory": (resource.RLIMIT_AS, daemon.memory_info().vms + SPARE_BYTES),
        }[what]
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (limit, before[1]))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, kind, before)

    def _watch(self, event: Event, is_seen: Callable[[], bool]) -> None:
        """Wait until the event is over, and look whether somebody says so."""
        event.is_due = event.action == "stop" and event.lasted_s > BOUNDS_S[event.target]
        end_s = time.monotonic() + event.lasted_s
        if event.is_due:
            while time.monotonic() < end_s + BOUNDS_S[event.target]:
                if is_seen():
                    event.noticed_s = round(time.time() - event.at, 1)
                    break
                time.sleep(0.5)
        time.sleep(max(0.0, end_s - time.monotonic()))

    def _look_at(self, event: Event) -> Callable[[], bool]:
        """What tells whether somebody says that the part stands: the status, or of a worker the
        log. It compares with how things are now."""
        here = self.deployment
        log = here.home.log / "gateway.log"
        log_bytes = log.stat().st_size
        if event.target == "worker":
            return lambda: b"has been stuck" in log.read_bytes()[log_bytes:]
        now = here.client.get("/status")
        before, num_stalls = now["engines"][0], now["progress"]["num_loop_stalls"]

        def is_daemon_seen() -> bool:
            told = view_jobs(here.home)
            if told["progress"] is None:
                return "gave no answer" in str(told["stalled"])
            return bool(told["progress"]["num_loop_stalls"] > num_stalls)

        def is_engine_seen() -> bool:
            with suppress(BatchrunError):
                (engine, _) = here.client.get("/status")["engines"]
                has_hung = engine["num_hangs"] > before["num_hangs"]
                return bool(has_hung or engine["state"] != "ready" or engine["stalled_s"] >= 5)
            return False

        return is_daemon_seen if event.target == "daemon" else is_engine_seen

    def _finish(self) -> None:
        assert self._caller is not None
        self._caller.stop()
        spans = [
            (event.at, event.at + event.lasted_s)
            for event in self.events
            if event.target in GATEWAY_PARTS
        ]
        self.all_calls, self.all_met = self._caller.attainment(())
        self.num_calls, self.num_met = self._caller.attainment(spans)
        super()._finish()


def _num_threads() -> int:
    """That this user has; of root's none count."""
    found = psutil.process_iter(["uids", "num_threads"])
    mine = [each.info["num_threads"] for each in found if each.info["uids"].real == os.getuid()]
    return sum(mine) if os.getuid() else 0


def records_of(episode: EventEpisode, which: Record) -> Iterator[Record]:
    """One for each event, and one for the deployment that lived through them."""
    for event in episode.events:
        yield {"kind": "event", **which, **asdict(event), "is_missed": event.is_missed}
    yield {
        "kind": "event deployment",
        **which,
        "num_events": len(episode.events),
        "num_jobs": len(episode.jobs),
        "num_rows": len(episode.commits),
        "num_executions": len(episode.executions),
        "num_calls": episode.num_calls,
        "num_met": episode.num_met,
        "all_calls": episode.all_calls,
        "all_met": episode.all_met,
        "num_problems": len(episode.problems),
        "problems": "; ".join(episode.problems[:5]),
    }


def event_bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What the events must keep."""
    events = [each for each in records if each["kind"] == "event"]
    deployments = [each for each in records if each["kind"] != "event"]

    def total(name: str) -> int:
        return int(sum(each[name] for each in deployments))

    yield Bar("events", len(events), 1)
    yield Bar("rows", total("num_rows"))
    yield Bar("broken promises", total("num_problems"), 0, is_most=True)
    ended = sum(event["has_ended"] for event in events)
    yield Bar("times that the daemon ended for want of something", ended)
    yield Bar("stops longer than their bound", sum(event["is_due"] for event in events))
    missed = sum(event["is_missed"] for event in events)
    yield Bar("of them not noticed within twice the bound", missed, 0, is_most=True)
    share = total("all_met") / max(1, total("all_calls"))
    yield Bar("share in time of all calls to an engine that nothing was done to", share)
    share = total("num_met") / max(1, total("num_calls"))
    yield Bar("the same, without those while a worker of the gateway stood", share, 0.98)
