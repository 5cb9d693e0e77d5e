"""What else may happen to a deployment that lives: parts stop, replies are spoilt, what a process
needs runs out, the clock jumps. Part of `python -m benchmarks.crash`.

Jobs run on an engine behind a proxy. A second engine, which nothing is done to, serves calls all
the time; none of its calls may be lost, but those that a stopped gateway holds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
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
from benchmarks.crash_account import (
    ROW,
    check_executions,
    check_home,
    read_commits,
    read_executions,
)
from benchmarks.crash_around import SPOILT, STEADY, Caller, Proxy
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

SHORTEST_S, LONGEST_S = 1.0, 60.0
BOUNDS_S = {"daemon": 10.0, "worker": 5.0, "engine": 30.0}
"""A part that stands for so long is noticed within twice that."""
GATEWAY_PARTS = frozenset({"worker"})
EVENTS = (
    *(("stop", part) for part in BOUNDS_S),
    *(("spoil", how) for how in SPOILT),
    *(("starve", what) for what in ("files", "disk", "memory", "threads")),
    ("jump", "clock"),
)
ROWS_BETWEEN = 4
"""So many results are committed before the next event."""
SPARE_FILES, SPARE_BYTES = 3, 1 << 20
KEPT_RIGHTS = "+dac_override,+fowner"
USERS = itertools.count(54_321)
"""Limits of threads do not hold for root, and count all threads of a user."""
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


@dataclass(frozen=True, slots=True)
class EventPlan:
    """The events of one deployment, in which so many engines run rows; one of them is disturbed."""

    name: str
    rng: random.Random
    events: Sequence[Event]
    num_engines: int = 1


class EventEpisode(Episode):
    """Events one after the other while jobs and calls come and go; ends early when a promise is
    broken. Jobs are in the database `store_url`, or in SQLite. After `run` also: the events, and
    what came of the calls."""

    def __init__(self, folder: Path, plan: EventPlan, store_url: str | None) -> None:
        super().__init__(folder, plan.rng)
        self.num_engines, self.store_url = plan.num_engines, store_url
        self.points = FailpointServer(folder, plan.rng)
        self.executions = self.commits = pl.DataFrame()
        self.events: list[Event] = []
        self.num_calls = self.num_met = 0
        self.all_calls = self.all_met = 0
        self._planned = plan.events
        self._clock = folder / "clock"
        self._proxy: Proxy | None = None
        self._caller: Caller | None = None

    def run(self) -> None:
        """As every episode; rows may run again, but not once their results are committed."""
        super().run()
        self.points.close()
        self.executions = read_executions(self.deployment.executions_path)
        self.commits = read_commits(self.deployment)
        targets = {event.target for event in self.events}
        if self.problems:
            return
        if "clock" not in targets:
            self.problems += check_executions(None, self.executions, self.commits)
        elif targets == {"clock"}:
            # Nobody can tell what came first, but a clock is no reason to run a row twice.
            again = self.executions.group_by(ROW).len().filter(pl.col("len") > 1)
            self.problems += [f"{job}, row {row}: ran {n} times" for job, row, n in again.rows()]

    def _start(self, exits: ExitStack) -> None:
        here = self.deployment
        here.failpoints = f"{self.points.spec},clock={self._clock}"
        if any(event.target == "threads" for event in self._planned):
            user = _new_user() if os.getuid() == 0 else ()
            here.user = (*user, "prlimit", f"--nproc={_num_threads() + MOST_THREADS}")
        proxy_port = free_port()
        here.use_fake_engine(LATENCY_S, rules=RULES)
        config = here.folder / "batchrun.yaml"
        document: dict[str, Any] = json.loads(config.read_text())
        (disturbed,) = document["engines"]
        engines = [{**disturbed, "name": "0", "url": f"http://127.0.0.1:{proxy_port}"}]
        for name in map(str, range(1, self.num_engines)):
            engines.append(_engine(name, *disturbed["command"]))
        fake = (sys.executable, "-m", "batchrun.engine.fake")
        engines.append(_engine(STEADY, *fake, f"--model={STEADY}", "--tokens-per-s=50"))
        document |= {"engines": engines, "window": {"requests": WINDOW_ROWS}, "gateway_workers": 2}
        if self.store_url is not None:
            document["store"] = self.store_url
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
            is_seen = self._look_at(event)
            event.at = time.time()
            with self._happening(event):
                self._watch(event, is_seen)
            self.events.append(event)
            self.problems += check_home(self.deployment)
            if self.problems or watcher.problems:
                break

    def _go_on(self) -> None:
        """There are always some jobs, and rows that end."""
        num_rows = len(read_commits(self.deployment)) + ROWS_BETWEEN

        def are_running() -> bool:
            with suppress(BatchrunError):
                self._mend()
                while len(self._live()) < 2:
                    self.deployment.submit(self._write(4 * SHORT_ROWS))
            return len(read_commits(self.deployment)) >= num_rows

        wait_until(are_running, "rows to end again: the jobs are stuck", END_WAIT_S, 0.25)

    def _mend(self) -> None:
        """As an operator does: jobs that paused go on, and so does a daemon that ended for want of
        something."""
        last = self.events[-1] if self.events else None
        lives = self.deployment.lives(self.deployment.pid_of("daemon"))
        if last is not None and last.action == "starve" and not lives:
            last.has_ended = True
            self.deployment.start()
        for job in self._live():
            if job.state is JobState.PAUSED:
                self.deployment.client.post(f"/jobs/{job.id}/resume")

    def _have_ended(self) -> bool:
        with suppress(BatchrunError):
            self._mend()
        return super()._have_ended()

    @contextmanager
    def _happening(self, event: Event) -> Iterator[None]:
        assert self._proxy is not None
        if event.action == "stop":
            with self._stopped(event):
                yield
        elif event.action == "spoil":
            with _set(self._proxy, "how", event.target, ""):
                yield
        elif event.target == "threads":
            with self._without_threads():
                yield
        elif event.target in {"files", "memory"}:
            with self._limited(event.target):
                yield
        elif event.target == "disk":
            with _set(self.points, "is_disk_full", True, False):
                yield
        else:
            self._clock.write_text(str(self._rng.uniform(-MAX_JUMP_S, MAX_JUMP_S)))
            yield
            self._clock.unlink()

    @contextmanager
    def _stopped(self, event: Event) -> Iterator[None]:
        pid = self._find(event.target)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def _without_threads(self) -> Iterator[None]:
        command = [*self.deployment.user, sys.executable, "-I", "-S", "-c", HOG]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as hog:
            assert hog.stdout is not None and hog.stdout.readline()
            try:
                yield
            finally:
                hog.kill()

    def _find(self, part: str) -> int:
        """The part's process, which may just be started anew."""
        wait_until(lambda: self.deployment.pid_of(part), f"the {part} to run")
        return self.deployment.pid_of(part)

    @contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        """The daemon may have hardly more than it has."""
        daemon = psutil.Process(self._find("daemon"))
        option, limit = {
            "files": ("--nofile", daemon.num_fds() + SPARE_FILES),
            "memory": ("--as", daemon.memory_info().vms + SPARE_BYTES),
        }[what]
        before = self._prlimit(daemon.pid, "--raw", "--noheadings", "--output=SOFT", option)
        self._prlimit(daemon.pid, f"{option}={limit}:")
        try:
            yield
        finally:
            if daemon.is_running():
                self._prlimit(daemon.pid, f"{option}={before}:")

    def _prlimit(self, pid: int, *options: str) -> str:
        """What `prlimit` says of a process; asked by its user, since root alone may not."""
        command = [*self.deployment.user, "prlimit", f"--pid={pid}", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def _watch(self, event: Event, is_seen: Callable[[], bool]) -> None:
        """Wait until the event is over, and look whether somebody says so."""
        event.is_due = event.action == "stop" and event.lasted_s > BOUNDS_S[event.target]
        end_s = time.monotonic() + event.lasted_s
        if event.is_due:
            while time.monotonic() < end_s + BOUNDS_S[event.target]:
                with suppress(BatchrunError):
                    if is_seen():
                        event.noticed_s = round(time.time() - event.at, 1)
                        break
                time.sleep(0.5)
        time.sleep(max(0.0, end_s - time.monotonic()))

    def _look_at(self, event: Event) -> Callable[[], bool]:
        """What tells whether the status says that the part stands, or stood; it compares with how
        things are now."""
        here = self.deployment
        now = here.client.get("/status")
        before, progress = now["engines"][0], now["progress"]

        def is_daemon_seen() -> bool:
            told = view_jobs(here.home)
            if told["progress"] is None:
                return "gave no answer" in str(told["stalled"])
            return bool(told["progress"]["num_loop_stalls"] > progress["num_loop_stalls"])

        def is_worker_seen() -> bool:
            replaced = here.client.get("/status")["progress"]["replaced_workers"]
            return bool(replaced["stuck"] > progress["replaced_workers"]["stuck"])

        def is_engine_seen() -> bool:
            engine = here.client.get("/status")["engines"][0]
            has_hung = engine["num_hangs"] > before["num_hangs"]
            return bool(has_hung or engine["state"] != "ready" or engine["stalled_s"] >= 5)

        looks = {"daemon": is_daemon_seen, "worker": is_worker_seen}
        return looks.get(event.target, is_engine_seen)

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


def _engine(name: str, *command: str) -> dict[str, Any]:
    """A fake engine with a port of its own."""
    port = free_port()
    return {"name": name, "command": [*command, f"--port={port}"], "port": port}


def _new_user() -> tuple[str, ...]:
    """What runs a command as a user whom nobody else is, who may do what root does to files."""
    user, rights = next(USERS), f"-caps={KEPT_RIGHTS}"
    who = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return ("setpriv", *who, f"--inh{rights}", f"--ambient{rights}")


@contextmanager
def _set(where: object, name: str, value: object, after: object) -> Iterator[None]:
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, after)


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
        "store": "sqlite" if episode.store_url is None else "postgresql",
        "num_engines": episode.num_engines,
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


def event_bars(records: Sequence[Record], num_planned: int) -> Iterator[Bar]:
    """What the events must keep; a deployment that broke a promise ends before its last one."""
    events = [each for each in records if each["kind"] == "event"]
    deployments = [each for each in records if each["kind"] != "event"]

    def total(name: str) -> int:
        return int(sum(each[name] for each in deployments))

    yield Bar("events", len(events), num_planned)
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
