"""The account of jobs that lived through kills: what ran, was committed, and is in the output.

Every function returns the promises that were broken, one line each; none means that all hold.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchrun.engine.fake.answers import generate, parse_call
from batchrun.jobs.results.keeping import check_files
from batchrun.store.check import check_store, readable_jobs
from batchrun.store.database import open_to_read
from benchmarks.crash_rig import MAX_TOKENS, CrashRig, prompt

MAX_MODEL_TOKENS = 8_192
REQUEST_ID = re.compile(r"batchrun-(\d+)-(job_\w+)-(\d+)-\d+")
LEFTOVERS = ("*.part", "*.tmp")

RowKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution that the engine began: of a row, for a start (`epoch`) of the daemon."""

    key: RowKey
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of `target`; `place` says where in its code, "" for a random instant.

    `is_inside`: in an open transaction, or between the syncing of a file and that of its rename.
    `cuts`: it ends executions, or their replies. From `at` until the deployment was told to go on
    at `ended_at`; UTC epoch seconds.
    """

    target: str
    place: str
    is_inside: bool
    cuts: bool
    at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Reach:
    """What a kill met: rows that ran at that instant, and rows sent whose result was not there."""

    num_in_flight: int
    num_uncommitted: int


def read_executions(path: Path) -> list[Execution]:
    """Every execution that an engine began, in order; those of offline rows alone."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for entry in map(json.loads, lines):
        match = REQUEST_ID.fullmatch(str(entry["request_id"]))
        if match is not None:
            key = (match[2], int(match[3]))
            found.append(Execution(key, int(match[1]), float(entry["at"])))
    return found


def read_commits(store: Path) -> dict[RowKey, float]:
    """When each result was committed: the instant just before its transaction."""
    query = "SELECT jobs.id, row, committed_at FROM results JOIN jobs ON jobs.seq = results.job_seq"
    return {(job, row): at for job, row, at in select(store, query)}


def select(store: Path, query: str) -> list[tuple[Any, ...]]:
    """What the store's file tells, beside a daemon too."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(query).fetchall()


def measure_reach(
    kills: Sequence[Kill],
    executions: Sequence[Execution],
    commits: Mapping[RowKey, float],
    latency_s: float,
) -> list[Reach]:
    """What each kill met. An execution runs for `latency_s`, unless an earlier kill cut it.

    A request that is on its way when the daemon dies begins a little later: it is counted by the
    epoch that sent it. So is one that goes to a dead engine before the daemon knows.
    """
    found = []
    cut_at = 0.0
    for kill in kills:
        epoch = max((e.epoch for e in executions if e.at <= kill.at), default=0)
        sent = [
            e
            for e in executions
            if e.epoch == epoch and e.at > cut_at and commits.get(e.key, kill.at) >= kill.at
        ]
        if not kill.cuts:
            sent = [e for e in sent if e.at <= kill.at]
        elif kill.target == "engine":
            sent = [e for e in sent if e.at <= kill.ended_at]
        running = {e.key for e in sent if e.at <= kill.at < e.at + latency_s}
        found.append(Reach(len(running), len({e.key for e in sent})))
        cut_at = kill.at if kill.cuts else cut_at
    return found


def check_ends(executions: Sequence[Execution], commits: Mapping[RowKey, float]) -> Iterator[str]:
    """Rows that ran and were lost, and rows that ran when they were done."""
    for key, instants in _instants(executions).items():
        committed_at = commits.get(key)
        if committed_at is None:
            yield f"{key[0]}, row {key[1]}: ran and has no result"
        elif max(instants) > committed_at:
            yield f"{key[0]}, row {key[1]}: an execution began after its result was committed"


def check_executions(
    kills: Sequence[Kill],
    executions: Sequence[Execution],
    commits: Mapping[RowKey, float],
    latency_s: float,
) -> Iterator[str]:
    """As `check_ends`; and rows that ran again without a kill that explains it."""
    yield from check_ends(executions, commits)
    begun = _instants(executions)
    cutting = [kill for kill in kills if kill.cuts]
    for key, instants in begun.items():
        end = commits.get(key, 0.0)
        cuts = [kill for kill in cutting if min(instants) <= kill.ended_at and end >= kill.at]
        if len(instants) - 1 > len(cuts):
            yield f"{key[0]}, row {key[1]}: ran {len(instants)} times, cut {len(cuts)} times"
    reaches = measure_reach(kills, executions, commits, latency_s)
    pairs = zip(kills, reaches, strict=True)
    allowed = sum(reach.num_uncommitted for kill, reach in pairs if kill.cuts)
    num_extra = len(executions) - len(begun)
    if num_extra > allowed:
        yield f"{num_extra} executions too many, and the kills explain {allowed}"


def _instants(executions: Sequence[Execution]) -> dict[RowKey, list[float]]:
    begun: dict[RowKey, list[float]] = defaultdict(list)
    for execution in executions:
        begun[execution.key].append(execution.at)
    return begun


def check_output(path: Path, name: str, num_rows: int) -> Iterator[str]:
    """Whether a file holds every row once, in order, each with the answer to its own prompt."""
    if not path.exists():
        yield f"{path.name}: is not there"
        return
    rows = read_output(path)
    if [row["id"] for row in rows] != [f"{name}-{row}" for row in range(num_rows)]:
        yield f"{path.name}: not every row once and in order ({len(rows)} of {num_rows})"
        return
    for number, row in enumerate(rows):
        wanted = (None, expected_answer(prompt(name, number)))
        if (row["error"], row["response"]) != wanted:
            yield f"{path.name}, row {number}: error {row['error']}, answer {row['response']!r}"


def read_output(path: Path) -> list[dict[str, Any]]:
    """The rows of an output file, Parquet or JSONL."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def expected_answer(text: str) -> str:
    """What the fake engine answers to a prompt."""
    body = {"max_tokens": MAX_TOKENS, "messages": [{"role": "user", "content": text}]}
    call = parse_call(body, is_chat=True, max_model_tokens=MAX_MODEL_TOKENS)
    (choice,) = generate(call, max_model_tokens=MAX_MODEL_TOKENS, finish_reason=None)
    return "".join(choice.tokens)


def check_home(rig: CrashRig) -> Iterator[str]:
    """What `batchrun store check` finds, read here in one process: inside, and the jobs' files."""
    if not rig.home.store.exists():
        return
    store = open_to_read(rig.home.store)
    try:
        yield from map(str, check_store(store))
        yield from map(str, check_files(readable_jobs(store), links=rig.home.inputs))
    finally:
        store.close()


def check_command(rig: CrashRig) -> Iterator[str]:
    """What the command itself says of the store."""
    done = rig.call("store", "check")
    if done.returncode != 0:
        yield f"store check: exit {done.returncode}: {done.stdout.strip()} {done.stderr.strip()}"


def check_leftovers(rig: CrashRig) -> Iterator[str]:
    """Temporary files and processes that outlived a deployment which was ended."""
    for pattern in LEFTOVERS:
        for path in rig.folder.rglob(pattern):
            yield f"{path.relative_to(rig.folder)}: a temporary file was left"
    for pid in rig.find_orphans():
        yield f"process {pid}: runs on after `batchrun down`"
