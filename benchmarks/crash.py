"""Kill everything and count: nothing lost, nothing doubled, nothing stuck.

    python -m benchmarks.crash [--seed N] [--kills N] [--lanes N] [--only PART ...] [--json FILE]
    python -m benchmarks.crash --events N [--targets NAME ...] [--store KIND] [--json FILE]

Real daemons, gateways, engines and commands are killed at random instants and inside commits and
renames (`kills`), a real vLLM too (`vllm`), engines with their agents (`agents`), in `--lanes`
deployments at once; and, only when asked for, two real vLLMs with agents beside calls (`fleet`).
With `--events` nothing is killed: what else may happen is in crash_events.py, on SQLite and
PostgreSQL by turns.
After each, every promise of `docs/reliability.md` is checked. Exits 1 when one was broken, and then
keeps the folder, which is in TMPDIR: a disk, not memory. The faults of the same page:
tests/integration/test_crash.py
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from batchrun.types import JobState
from benchmarks.crash_account import (
    Kill,
    check_executions,
    check_home,
    count_explained,
    measure_reach,
    read_commits,
    read_executions,
    read_jobs,
)
from benchmarks.crash_events import (
    EVENTS,
    EventEpisode,
    EventPlan,
    event_bars,
    plan_events,
    records_of,
)
from benchmarks.crash_fleet import FLEET_KILLS, FLEET_TARGETS, FleetEpisode, fleet_bars
from benchmarks.crash_rig import (
    DURING_COMMIT,
    END_WAIT_S,
    INSIDE_COMMIT,
    INSIDE_RENAME,
    LATENCY_S,
    POLL_S,
    RULES,
    SHORT_ROWS,
    WINDOW_ROWS,
    Episode,
    FailpointServer,
    StatusWatcher,
)
from benchmarks.deployment import answers, wait_until
from benchmarks.records import Bar, Record, finish, parser, write_records

PARTS = ("kills", "vllm", "agents")
FLEET = "fleet"
VLLM_TARGETS = ("engine", "daemon", "engine", "all", "engine", "engine")
KILLS_PER_DEPLOYMENT = 30
EVENTS_PER_DEPLOYMENT = 10
MIN_VLLM_KILLS = 5
MIN_FOR_SHARES = 40
"""Of fewer kills than this, the shares say nothing."""
AROUND = ("store.commit.after", "writer.commit.before", "writer.commit.after", "output.sync.before")
MIN_IN_FLIGHT = 4
PAUSE_S = 0.4
TRAP_WAIT_S = 15.0
VLLM_ARGS = ("--kv-cache-memory-bytes=268435456", "--max-model-len=4096", "--max-num-seqs=16")
VLLM_REQUEST = "max_tokens: 96, temperature: 0, ignore_eos: true"
VLLM_ROW_S = 0.2
"""A row takes longer than this: 96 steps of the tiny model."""

Plan = tuple[str, random.Random, Sequence[str]]
"""The name of a deployment, and what is killed in it one after the other."""


class Target(NamedTuple):
    """What is killed in `share` of a hundred kills: parts of the deployment, or a command.

    At one of `places` in its code; without, at any instant.
    """

    share: int
    who: tuple[str, ...]
    places: tuple[str, ...] = ()


TARGETS = {
    "daemon": Target(8, ("daemon",)),
    "daemon in a commit": Target(22, ("daemon",), (*INSIDE_COMMIT, DURING_COMMIT)),
    "daemon in a rename": Target(12, ("daemon",), INSIDE_RENAME),
    "writer": Target(10, ("daemon",), AROUND),
    "engine": Target(17, ("engine",)),
    "gateway": Target(8, ("gateway",)),
    "gateway worker": Target(4, ("worker",)),
    "submit": Target(3, ("submit",)),
    "results": Target(8, ("results",), ("output.sync.before", *INSIDE_RENAME, *INSIDE_RENAME)),
    "all": Target(8, ("daemon", "gateway", "engine")),
    "agent": Target(0, ("agent",)),
    "guard": Target(0, ("guard",)),
}
AGENT_TARGETS = ("agent", "engine", "daemon", "gateway", "guard", "agent")
"""Killed again and again, in a random order, where the engine has an agent."""
AGENT_KILLS = 60


def plan_targets(rng: random.Random, num_kills: int) -> list[str]:
    """What each kill hits: the shares of `TARGETS`, in a random order."""
    names = [name for name, target in TARGETS.items() for _ in range(target.share)]
    step = len(names) / num_kills
    offset = rng.random() * step
    plan = [names[int(offset + index * step) % len(names)] for index in range(num_kills)]
    rng.shuffle(plan)
    return plan


class KillEpisode(Episode):
    """Kills of `targets`, one after the other; ends early when a promise is broken.

    After `run` also: its kills and what each met, and what ran and was committed.
    """

    row_s = LATENCY_S
    """A row runs for so long at least."""
    long_rows = 700
    rows_between = 4
    """So many results are committed before the next kill."""

    def __init__(self, folder: Path, rng: random.Random, targets: Sequence[str]) -> None:
        super().__init__(folder, rng)
        self.points = FailpointServer(folder, rng)
        self.kills: list[Kill] = []
        self.executions = self.commits = pl.DataFrame()
        self._targets = targets

    def run(self) -> None:
        """As every episode; and what ran must be what the kills explain."""
        super().run()
        self.points.close()
        self.executions = read_executions(self.deployment.executions_path)
        self.commits = read_commits(self.deployment)
        measure_reach(self.kills, self.executions, self.commits, self.row_s)
        if not self.problems:
            self.problems += check_executions(self.kills, self.executions, self.commits)

    def _start(self, exits: ExitStack) -> None:
        self.deployment.failpoints = self.points.spec
        window = {"requests": WINDOW_ROWS}
        self.deployment.use_fake_engine(LATENCY_S, rules=RULES, window=window, gateway_workers=2)
        self.deployment.start()

    def _work(self, watcher: StatusWatcher) -> None:
        for name in self._targets:
            self._wait_for_rows()
            kill = self._kill(name)
            kill.ended_at = time.time()
            self._bring_back(TARGETS[name].who)
            kill.down_s = time.time() - kill.at
            self.kills.append(kill)
            self.problems += check_home(self.deployment)
            if self.problems or watcher.problems:
                break

    def _wait_for_rows(self) -> None:
        """There is always a long job that runs, and a short one."""
        num_rows = len(read_commits(self.deployment)) + self.rows_between

        def are_running() -> bool:
            live = [job.num_rows for job in self._live()]
            if self.long_rows not in live:
                self.deployment.submit(self._write(self.long_rows))
            if len(live) < 2:
                self.deployment.submit(self._write(SHORT_ROWS))
            views = self.deployment.client.get("/status")["jobs"]
            num_in_flight = sum(view["num_in_flight"] for view in views)
            are_enough = len(read_commits(self.deployment)) >= num_rows
            return are_enough and num_in_flight >= MIN_IN_FLIGHT

        wait_until(are_running, "rows to run again: the jobs are stuck", END_WAIT_S, POLL_S)
        time.sleep(self._rng.uniform(0, PAUSE_S))

    def _kill(self, name: str) -> Kill:
        who, places = TARGETS[name].who, TARGETS[name].places
        if places == INSIDE_RENAME:
            self.deployment.submit(self._write(SHORT_ROWS))
        command = self._start_command(name)
        pid = self.deployment.pid_of(who[0]) if command is None else command.pid
        kill = Kill(name)
        if places:
            kill.place = self._rng.choice(places)
            self.points.set_trap(pid, kill).wait(TRAP_WAIT_S)
            self.points.clear()
        if not kill.at:
            kill.at, kill.place = time.time(), "random"
            if command is not None:
                command.kill()
            for part in who if command is None else ():
                self.deployment.kill(part)
        if command is None:
            wait_until(lambda: not self.deployment.lives(pid), f"the {who[0]} to end")
        elif command.wait() != -signal.SIGKILL:
            if name == "submit":
                return self._kill(name)
            self.problems.append(f"{name}: exit {command.returncode} before it was killed")
        return kill

    def _start_command(self, name: str) -> subprocess.Popen[bytes] | None:
        """`submit`, at any instant of its life; or `results -o`, which puts a copy in place."""
        if name == "submit":
            command = self.deployment.popen("submit", self._write(SHORT_ROWS).name)
            time.sleep(self._rng.uniform(0.2, 2.0))
            return command
        if name == "results":
            jobs = read_jobs(self.deployment)
            done = [job.name for job in jobs if job.state == JobState.COMPLETED]
            wanted = (done[0],) if done else (jobs[0].name, "--partial")
            return self.deployment.popen("results", *wanted, "-o", "copy.parquet")
        return None

    def _bring_back(self, who: Sequence[str]) -> None:
        if "daemon" in who:
            self.deployment.start()
        elif who[0] in {"gateway", "worker"}:
            models = f"{self.deployment.url}/v1/models"
            wait_until(lambda: answers(models), "the gateway to answer again")

    def _finish(self) -> None:
        # What a killed `results` left is cleared away by the next that writes there.
        super()._finish()
        self.deployment.batchrun("results", self.jobs[0].name, "-o", "copy.parquet")
        states = [(job.name, job.state) for job in self.jobs]
        self.problems += [f"{name}: {s}" for name, s in states if s != JobState.COMPLETED]


class AgentEpisode(KillEpisode):
    """The same with an engine that has an agent, whose guard is killed too."""

    def _start(self, exits: ExitStack) -> None:
        window = {"requests": WINDOW_ROWS}
        self.deployment.use_agents(1, LATENCY_S, rules=RULES, window=window, gateway_workers=2)
        self.deployment.start_agent()
        self.deployment.start()

    def _bring_back(self, who: Sequence[str]) -> None:
        if who[0] == "agent":
            self.deployment.start_agent()
        super()._bring_back(who)


class VllmEpisode(KillEpisode):
    """The same with the real engine, behind a proxy that notes every execution."""

    has_known_answers = False
    row_s = VLLM_ROW_S
    long_rows = 480
    rows_between = 40

    def _start(self, exits: ExitStack) -> None:
        here = self.deployment
        here.request = VLLM_REQUEST
        exits.enter_context(here.counted_vllm(*VLLM_ARGS, window={"requests": WINDOW_ROWS}))
        here.start()

    def _kill(self, name: str) -> Kill:
        """Children of an engine hold its port for a moment, and rows that were on their way still
        seem to reach it: the outage lasts until the next one answers."""
        kill = super()._kill(name)
        if name == "engine":
            wait_until(lambda: not self._is_ready(), "the engine to be missed", END_WAIT_S)
            wait_until(self._is_ready, "the engine again", END_WAIT_S)
        return kill

    def _is_ready(self) -> bool:
        return bool(self.deployment.client.get("/status")["engines"][0]["state"] == "ready")


def main() -> int:
    """Run what was asked for, print and save. Exits 1 when a promise was broken or a bar missed."""
    made = parser(__doc__, seed=1, kills=300, lanes=2, events=0)
    parts = (*PARTS, FLEET)
    made.add_argument("--only", nargs="+", choices=parts, default=PARTS, metavar="PART")
    made.add_argument("--targets", nargs="+", choices=[name for _, name in EVENTS], default=None)
    made.add_argument("--store", choices=("sqlite", "postgresql", "both"), default="both")
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    began_s = time.monotonic()
    with ExitStack() as exits:
        # Two real engines have all cores.
        num_lanes = 1 if FLEET in options.only else options.lanes
        pool = exits.enter_context(ThreadPoolExecutor(num_lanes))
        if options.events:
            planned = event_plans(options.events, options.seed, options.targets)
            stores = _stores(options.store, len(planned), exits)
            done = pool.map(partial(_run_events, folder), planned, stores)
        else:
            plans = list(_plans(options.only, options.kills, options.seed))
            done = pool.map(partial(_run, folder), plans)
        records: list[Record] = []
        for more in done:
            records += more
            if options.json is not None:  # Hours of work may be cut short.
                write_records(options.json, records)
    found = event_bars(records, options.events) if options.events else bars(records)
    code = finish(options.json, records, found)
    print(f"{time.monotonic() - began_s:,.0f} s")
    if code:
        print(f"seed {options.seed}; kept for study: {folder}")
    else:
        shutil.rmtree(folder)
    return code


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What the kills must keep."""
    table = pl.DataFrame(records, infer_schema_length=None)
    kills = table.filter(kind="kill")
    yield Bar("kills", len(kills), 1)
    if kills.is_empty():
        return
    is_enough = len(kills.filter(is_vllm=False)) >= MIN_FOR_SHARES
    flight = len(kills.filter(pl.col("num_in_flight") > 0)) / len(kills)
    yield Bar("share of kills with rows in flight", flight, 0.8 if is_enough else None)
    inside = len(kills.filter(is_inside=True)) / len(kills)
    yield Bar("share of kills inside a commit or a rename", inside, 0.3 if is_enough else None)
    totals = table.select(pl.col("num_rows", "num_executions", "num_explained", "num_problems"))
    num_rows, num_executions, num_explained, num_problems = totals.sum().row(0)
    yield Bar("rows", num_rows)
    again = num_executions - num_rows
    yield Bar("executions beyond one a row", again, num_explained, is_most=True)
    yield Bar("broken promises", num_problems, 0, is_most=True)
    vllm = kills.filter(deployment="vllm")
    if len(vllm):
        real = len(vllm.filter(pl.col("target") != "daemon"))
        yield Bar("kills of a real vLLM", real, MIN_VLLM_KILLS)
    fleets = [each for each in records if "num_calls" in each]
    if fleets:
        yield from fleet_bars(fleets)


def event_plans(num_events: int, seed: int, targets: Sequence[str] | None) -> list[EventPlan]:
    """The events of each deployment; those of the clock have deployments of their own. One or two
    engines run rows, by turns of two."""
    planned = plan_events(random.Random(seed), num_events, targets)
    clocks = [event for event in planned if event.target == "clock"]
    others = [event for event in planned if event.target != "clock"]
    parts = [
        events[at : at + EVENTS_PER_DEPLOYMENT]
        for events in (others, clocks)
        for at in range(0, len(events), EVENTS_PER_DEPLOYMENT)
    ]
    return [
        EventPlan(f"events {at}", random.Random(f"{seed}/{at}"), events, 1 + at // 2 % 2)
        for at, events in enumerate(parts)
    ]


def _stores(kind: str, num_deployments: int, exits: ExitStack) -> list[str | None]:
    """For each deployment the URL of an empty database, or None for SQLite; `both`: by turns."""
    if kind == "sqlite":
        return [None] * num_deployments
    server: Any = import_module("tests.postgres_server").PostgresServer()
    exits.callback(server.close)
    is_both = kind == "both"
    return [
        None if is_both and at % 2 == 0 else server.new_database() for at in range(num_deployments)
    ]


def _run_events(folder: Path, plan: EventPlan, store_url: str | None) -> list[Record]:
    """A record for each event, and one for the deployment."""
    episode = EventEpisode(folder / plan.name.replace(" ", "-"), plan, store_url)
    try:
        episode.run()
    except Exception as error:  # noqa: BLE001 - one deployment must not end the others' run
        episode.problems.append(f"{type(error).__name__}: {error}")
    print(f"{plan.name}: {len(episode.events)} events", *episode.problems[:5], flush=True)
    return [*records_of(episode, {"deployment": plan.name})]


def _plans(only: Sequence[str], num_kills: int, seed: int) -> Iterator[Plan]:
    if "vllm" in only:
        yield "vllm", random.Random(seed), VLLM_TARGETS
        num_kills = max(1, num_kills - len(VLLM_TARGETS))
    if "agents" in only:
        yield from _in_turns("agents", AGENT_TARGETS, min(num_kills, AGENT_KILLS), seed)
    if FLEET in only:
        yield from _in_turns(FLEET, FLEET_TARGETS, min(num_kills, FLEET_KILLS), seed)
    if "kills" in only:
        targets = plan_targets(random.Random(seed), num_kills)
        num_deployments = max(1, round(num_kills / KILLS_PER_DEPLOYMENT))
        for index in range(num_deployments):
            rng = random.Random(f"{seed}/{index}")
            yield f"deployment {index}", rng, targets[index::num_deployments]


def _in_turns(part: str, targets: Sequence[str], num_kills: int, seed: int) -> Iterator[Plan]:
    """Deployments in which each of the targets is killed about as often, in a random order."""
    rng = random.Random(f"{seed}/{part}")
    times = -(-num_kills // len(targets))
    order = rng.sample([*targets] * times, num_kills)
    for index in range(0, num_kills, KILLS_PER_DEPLOYMENT):
        yield f"{part} {index}", rng, order[index : index + KILLS_PER_DEPLOYMENT]


def _episode(folder: Path, plan: Plan) -> KillEpisode | FleetEpisode:
    """Calls of every second fleet go through its agents."""
    name, rng, targets = plan
    where, (part, *number) = folder / name.replace(" ", "-"), name.split()
    if part == FLEET:
        is_apart = int(number[0]) // KILLS_PER_DEPLOYMENT % 2 == 0 and os.getuid() == 0
        return FleetEpisode(where, rng, targets, is_apart=is_apart)
    kinds = {"vllm": VllmEpisode, "agents": AgentEpisode}
    return kinds.get(part, KillEpisode)(where, rng, targets)


def _run(folder: Path, plan: Plan) -> list[Record]:
    """A record for each kill, and one for the deployment that lived through them."""
    name, episode = plan[0], _episode(folder, plan)
    episode.run()
    problems, num_rows = episode.problems, len(episode.commits)
    print(f"{name}: {len(episode.kills)} kills, {num_rows} rows", *problems[:5], flush=True)
    is_vllm = name == "vllm" or isinstance(episode, FleetEpisode)
    which = {"deployment": name, "is_vllm": is_vllm}
    kills: list[Record] = [{"kind": "kill", **which, **asdict(kill)} for kill in episode.kills]
    deployment: Record = {
        "kind": "deployment",
        "deployment": name,
        "num_kills": len(kills),
        "num_jobs": len(episode.jobs),
        "num_rows": num_rows,
        "num_executions": len(episode.executions),
        "num_explained": count_explained(episode.kills),
        "num_status_looks": episode.num_looks,
        "num_problems": len(problems),
        "problems": "; ".join(problems[:5]),
        **(episode.figures if isinstance(episode, FleetEpisode) else {}),
    }
    return [*kills, deployment]


if __name__ == "__main__":
    sys.exit(main())
