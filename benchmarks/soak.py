"""Jobs that come and go for half an hour beside faults: memory and file handles stay flat.

    python -m benchmarks.soak [--minutes M] [--seed N] [--folder PATH] [--json FILE]

Jobs are submitted, paused, resumed, cancelled, and run into deadlines; the engine answers garbage,
hangs up, is busy, and is killed now and then. Online calls go through the gateway. The memory and
the open files of daemon and gateway are sampled. In the end every job must have ended with every
row once in its output. Exits 1 when a promise is broken or a bar is missed.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import psutil

from batchrun.cli.client import DaemonClient
from batchrun.errors import BatchrunError
from batchrun.types import JobState
from benchmarks.crash_account import check_home, check_leftovers, check_output, read_output, select
from benchmarks.crash_rig import FAILURES, MODEL, CrashRig, StatusWatcher, wait_until
from benchmarks.records import Bar, Record, finish, parser

RULES = (
    {"match": {"every": 37}, "action": {"garbage": True}},
    {"match": {"every": 53}, "action": {"drop_connection": True}},
    {"match": {"every": 71}, "action": {"status": 503, "retry_after": "1"}},
)
LATENCY_S = 0.1
MAX_LIVE = 6
STEP_S = 0.5
SAMPLE_S = 2.0
ENGINE_KILL_S = 90.0
END_WAIT_S = 300.0
PARTS = ("daemon", "gateway")
MAX_MEMORY_GROWTH = 1.1
MAX_HANDLE_GROWTH = 1.2

Sample = tuple[float, str, int, int]
"""(seconds since the start, process, resident bytes, open files)"""


class Soak:
    """One deployment, and what was done to it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rig = CrashRig(folder)
        self.samples: list[Sample] = []
        self.num_engine_kills = 0
        self._rng = rng
        self._names = count()
        self._num_rows: dict[str, int] = {}

    def run(self, duration_s: float) -> list[str]:
        """Work so long, let every job end; returns the promises that were broken."""
        self.rig.use_fake_engine(LATENCY_S, rules=RULES, window={"requests": 32})
        self.rig.start()
        watcher = StatusWatcher(self.rig)
        try:
            self._work(duration_s)
            self._end_all()
            watcher.stop()
            problems = [*watcher.problems, *check_home(self.rig), *self._check_jobs()]
        except FAILURES as error:
            problems = [f"{type(error).__name__}: {error}"]
        finally:
            watcher.stop()
            self.rig.close()
        return [*problems, *check_leftovers(self.rig)]

    def count_states(self) -> dict[str, int]:
        """How many jobs ended in each state."""
        query = "SELECT state, COUNT(*) FROM jobs GROUP BY state"
        return {str(state): int(number) for state, number in select(self.rig.home.store, query)}

    def _work(self, duration_s: float) -> None:
        began_s = time.monotonic()
        sample_at_s, kill_at_s = 0.0, ENGINE_KILL_S
        while (now_s := time.monotonic() - began_s) < duration_s:
            self._act()
            self._call_online()
            if now_s >= sample_at_s:
                self.samples += [self._sample(part, now_s) for part in PARTS]
                sample_at_s = now_s + SAMPLE_S
            if now_s >= kill_at_s:
                self.rig.kill("engine")
                self.num_engine_kills += 1
                kill_at_s = now_s + ENGINE_KILL_S
            time.sleep(STEP_S)

    def _act(self) -> None:
        live = self._live()
        if len(live) < MAX_LIVE:
            self._submit()
            return
        job, state = self._rng.choice(live)
        action = self._rng.choice(("pause", "resume", "cancel"))
        if state == JobState.PAUSED and action == "pause":
            action = "resume"
        self._ask(job, action)

    def _submit(self) -> None:
        name = f"job{next(self._names)}"
        num_rows = self._rng.randrange(20, 300)
        more = "retries: 10\n"  # so that no row is broken by chance as often as it may be tried
        more += "deadline: 2s\n" if self._rng.random() < 0.2 else ""
        suffix = self._rng.choice(("parquet", "jsonl"))
        file = self.rig.write_job(name, num_rows, more, suffix)
        self.rig.submit(file)
        self._num_rows[f"{name}.out.{suffix}"] = num_rows

    def _ask(self, job: str, action: str) -> None:
        with suppress(BatchrunError):  # the job may have ended, or be in another state by now
            DaemonClient(self.rig.home).post(f"/jobs/{job}/{action}")

    def _live(self) -> list[tuple[str, str]]:
        jobs = select(self.rig.home.store, "SELECT id, state FROM jobs ORDER BY seq")
        return [(job, state) for job, state in jobs if not JobState(state).is_terminal]

    def _call_online(self) -> None:
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.rig.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with suppress(OSError), urllib.request.urlopen(request, timeout=10) as reply:
            reply.read()

    def _sample(self, part: str, now_s: float) -> Sample:
        process = psutil.Process(self.rig.pid_of(part))
        return now_s, part, process.memory_info().rss, process.num_fds()

    def _end_all(self) -> None:
        def have_ended() -> bool:
            for job, state in self._live():
                if state == JobState.PAUSED:
                    self._ask(job, "resume")
            time.sleep(STEP_S)
            return not self._live()

        wait_until(have_ended, "every job to end", END_WAIT_S)

    def _check_jobs(self) -> Iterator[str]:
        states = dict(select(self.rig.home.store, "SELECT name, state FROM jobs"))
        for output, num_rows in self._num_rows.items():
            name = output.partition(".")[0]
            path = self.rig.folder / output
            if states[name] == JobState.COMPLETED:
                yield from check_output(path, name, num_rows)
                continue
            ids = [row["id"] for row in read_output(path)]
            if ids != [f"{name}-{row}" for row in range(num_rows)]:
                yield f"{output}: {states[name]}, and not every row once and in order"


def growth(values: Sequence[float]) -> float:
    """The median of the last quarter over that of the second: 1.0 is flat."""
    quarter = len(values) // 4
    return float(np.median(values[-quarter:]) / np.median(values[quarter : 2 * quarter]))


def bars(samples: Sequence[Sample]) -> Iterator[Bar]:
    """Memory and open files of each process: what they may grow by."""
    for part in PARTS:
        memory = [float(rss) for _, name, rss, _ in samples if name == part]
        files = [float(number) for _, name, _, number in samples if name == part]
        yield Bar(f"{part}: memory, MB", memory[-1] / 1e6)
        yield Bar(f"{part}: memory, growth", growth(memory), MAX_MEMORY_GROWTH, is_most=True)
        yield Bar(f"{part}: open files, fewest", min(files))
        yield Bar(f"{part}: open files, most", max(files))
        yield Bar(f"{part}: open files, growth", growth(files), MAX_HANDLE_GROWTH, is_most=True)


def main() -> int:
    """Run, print and save. Exits 1 when a promise was broken or a bar missed."""
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--folder", type=Path, help="where to work; a disk, not memory")
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder))
    soak = Soak(folder, random.Random(options.seed))
    problems = soak.run(options.minutes * 60)
    found = [*bars(soak.samples), Bar("broken promises", len(problems), 0, is_most=True)]
    states = soak.count_states()
    print(f"jobs: {states}; the engine was killed {soak.num_engine_kills} times")
    print(*problems[:20], sep="\n")
    records: list[Record] = [{"kind": "bar", "name": b.name, "value": b.value} for b in found]
    records.append({"kind": "jobs", "engine_kills": soak.num_engine_kills, **states})
    print(f"seed {options.seed}, folder {folder}")
    return finish(options.json, records, found)


if __name__ == "__main__":
    raise SystemExit(main())
