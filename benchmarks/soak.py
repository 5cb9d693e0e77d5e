"""Jobs that come and go for half an hour beside faults: memory and file handles stay flat.

    python -m benchmarks.soak [--minutes M] [--seed N] [--json FILE]

Jobs are submitted, paused, resumed, cancelled, and run into deadlines; the engine answers garbage,
hangs up, is busy, and is killed now and then. Online calls go through the gateway. The memory and
the open files of daemon and gateway are sampled. In the end every job must have ended with every
row once in its output. Exits 1 when a promise is broken or a bar is missed.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import psutil

from batchrun.errors import BatchrunError
from batchrun.simulator.replay import CallArrival, ReplayTarget, replay
from batchrun.types import JobState
from benchmarks.crash_rig import Episode, StatusWatcher
from benchmarks.deployment import MODEL
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
PARTS = ("daemon", "gateway")
MAX_MEMORY_GROWTH = 1.1
MAX_HANDLE_GROWTH = 1.2

Samples = dict[str, list[tuple[int, int]]]
"""(resident bytes, open files) of each process."""


class Soak(Episode):
    """Faults and jobs without end for so many seconds."""

    def __init__(self, folder: Path, rng: random.Random, duration_s: float) -> None:
        super().__init__(folder, rng)
        self.samples: Samples = {part: [] for part in PARTS}
        self.num_engine_kills = 0
        self._duration_s = duration_s

    def _start(self, exits: ExitStack) -> None:
        self.deployment.use_fake_engine(LATENCY_S, rules=RULES, window={"requests": 32})
        self.deployment.start()

    def _work(self, watcher: StatusWatcher) -> None:
        began_s = time.monotonic()
        sample_at_s, kill_at_s = 0.0, ENGINE_KILL_S
        while (now_s := time.monotonic() - began_s) < self._duration_s:
            self._act()
            self._call_online()
            if now_s >= sample_at_s:
                for part in PARTS:
                    process = psutil.Process(self.deployment.pid_of(part))
                    self.samples[part].append((process.memory_info().rss, process.num_fds()))
                sample_at_s = now_s + SAMPLE_S
            if now_s >= kill_at_s:
                self.deployment.kill("engine")
                self.num_engine_kills += 1
                kill_at_s = now_s + ENGINE_KILL_S
            time.sleep(STEP_S)

    def _act(self) -> None:
        live = self._live()
        if len(live) < MAX_LIVE:
            more = "retries: 10\n"  # so that no row is broken by chance as often as it may be tried
            more += "deadline: 2s\n" if self._rng.random() < 0.2 else ""
            self.deployment.submit(self._write(self._rng.randrange(20, 300), more))
            return
        job = self._rng.choice(live)
        action = self._rng.choice(("pause", "resume", "cancel"))
        is_again = job.state == JobState.PAUSED and action == "pause"
        self._ask(job.id, "resume" if is_again else action)

    def _ask(self, job: str, action: str) -> None:
        with suppress(BatchrunError):  # the job may have ended, or be in another state by now
            self.deployment.client.post(f"/jobs/{job}/{action}")

    def _call_online(self) -> None:
        target = ReplayTarget(f"{self.deployment.url}/v1", MODEL, timeout_s=10.0)
        asyncio.run(replay([CallArrival(0.0, "hi", 4)], target))

    def _have_ended(self) -> bool:
        live = self._live()
        for job in live:
            if job.state == JobState.PAUSED:
                self._ask(job.id, "resume")
        return not live


def growth(values: Sequence[float]) -> float:
    """The median of the last quarter over that of the second: 1.0 is flat."""
    quarter = len(values) // 4
    return float(np.median(values[-quarter:]) / np.median(values[quarter : 2 * quarter]))


def bars(samples: Samples) -> Iterator[Bar]:
    """Memory and open files of each process: what they may grow by."""
    for part, found in samples.items():
        memory, files = zip(*found, strict=True)
        yield Bar(f"{part}: memory, MB", memory[-1] / 1e6)
        yield Bar(f"{part}: memory, growth", growth(memory), MAX_MEMORY_GROWTH, is_most=True)
        yield Bar(f"{part}: open files, fewest", min(files))
        yield Bar(f"{part}: open files, most", max(files))
        yield Bar(f"{part}: open files, growth", growth(files), MAX_HANDLE_GROWTH, is_most=True)


def main() -> int:
    """Run, print and save. Exits 1 when a promise was broken or a bar missed."""
    options = parser(__doc__, minutes=30.0, seed=1).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, random.Random(options.seed), options.minutes * 60)
    soak.run()
    found = [*bars(soak.samples), Bar("broken promises", len(soak.problems), 0, is_most=True)]
    states = dict(Counter(str(job.state) for job in soak.jobs))
    print(f"jobs: {states}; the engine was killed {soak.num_engine_kills} times")
    print(*soak.problems[:20], sep="\n")
    records: list[Record] = [{"kind": "bar", "name": b.name, "value": b.value} for b in found]
    records.append({"kind": "jobs", "engine_kills": soak.num_engine_kills, **states})
    print(f"seed {options.seed}, folder {folder}")
    return finish(options.json, records, found)


if __name__ == "__main__":
    raise SystemExit(main())
