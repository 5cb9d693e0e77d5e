"""The account of jobs that lived through kills: what ran, was committed, and is in the output.

Every `check_*` yields the promises that were broken, one line each; none means that all hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from batchrun.engine.fake.answers import generate, parse_call
from batchrun.jobs.results.keeping import check_files
from batchrun.store.check import check_store, readable_jobs
from batchrun.store.database import open_to_read
from batchrun.store.jobs import JobRecord, list_jobs
from benchmarks.deployment import MAX_TOKENS, Deployment, prompt

MAX_MODEL_TOKENS = 8_192
REQUEST_ID = r"^batchrun-(?<epoch>\d+)-(?<job>job_\w+)-(?<row>\d+)-\d+$"
COMMITS = (
    "SELECT jobs.id AS job, row, committed_at FROM results JOIN jobs ON jobs.seq = results.job_seq"
)
COMMIT_TYPES = {"job": pl.String, "row": pl.Int64, "committed_at": pl.Float64}
ROW = ["job", "row"]
LEFTOVERS = ("*.part", "*.tmp")
UNCUT = frozenset({"gateway", "gateway worker", "submit", "results", "guard"})
"""Kills that end no execution, nor its reply."""
ENGINE_ENDS = frozenset({"engine", "agent", "vllm", "core"})
"""Kills that end an engine, be it named behind this or not."""


@dataclass(slots=True)
class Kill:
    """A kill of `target`; `place` says where in its code, if not at a random instant.

    From `at` until the deployment was told to go on at `ended_at`, or until its engine answered
    again; UTC epoch seconds. `is_inside`: in an open transaction, or between the syncing of a file
    and that of its rename. `down_s`: until all was ready again. What it met (`measure_reach`): rows
    that ran at that instant, and rows sent whose result was not there.
    """

    target: str
    at: float = 0.0
    ended_at: float = 0.0
    place: str = "random"
    is_inside: bool = False
    down_s: float = 0.0
    num_in_flight: int = 0
    num_uncommitted: int = 0

    @property
    def cuts(self) -> bool:
        """Whether it ends executions, or their replies."""
        return self.target not in UNCUT

    @property
    def ends_engine(self) -> bool:
        """Whether it ends what runs on one engine."""
        return self.target.split()[0] in ENGINE_ENDS


def read_jobs(deployment: Deployment) -> list[JobRecord]:
    """Every job in the store, in the order of submission."""
    with closing(open_to_read(deployment.home.store_location)) as store:
        return list_jobs(store)


def read_executions(path: Path) -> pl.DataFrame:
    """Every execution of an offline row that an engine began, in order.

    `job`, `row`, the start of the daemon that sent it (`epoch`), and when it began (`at`).
    """
    types = {"request_id": pl.String, "at": pl.Float64}
    noted = pl.read_ndjson(path, schema=types) if path.exists() else pl.DataFrame(schema=types)
    parts = pl.col("request_id").str.extract_groups(REQUEST_ID)
    offline = noted.select(parts, "at").unnest("request_id").drop_nulls()
    return offline.cast({"epoch": pl.Int64, "row": pl.Int64})


def read_commits(deployment: Deployment) -> pl.DataFrame:
    """When each result (`job`, `row`) was committed: the instant just before its transaction."""
    with closing(open_to_read(deployment.home.store_location)) as store, store.read() as connection:
        return pl.read_database(COMMITS, connection, schema_overrides=COMMIT_TYPES)


def measure_reach(
    kills: Sequence[Kill], executions: pl.DataFrame, commits: pl.DataFrame, latency_s: float
) -> None:
    """Note what each kill met. An execution runs for `latency_s`, unless an earlier kill cut it.

    A request that is on its way when the daemon dies begins a little later: it is counted by the
    epoch that sent it. So is one that goes to a dead engine before the daemon knows.
    """
    at = pl.col("at")
    begun = executions.join(commits, on=ROW, how="left")
    cut_at = 0.0
    for kill in kills:
        until = kill.at if not kill.cuts else kill.ended_at if kill.ends_engine else None
        epoch = begun.filter(at <= kill.at)["epoch"].max()
        sent = begun.filter(
            pl.col("epoch") == (epoch or 0),
            at > cut_at,
            pl.col("committed_at").fill_null(kill.at) >= kill.at,
            at <= until if until else True,
        )
        running = sent.filter(at <= kill.at, at + latency_s > kill.at)
        kill.num_in_flight = running.n_unique(ROW)
        kill.num_uncommitted = sent.n_unique(ROW)
        cut_at = kill.at if kill.cuts else cut_at


def check_executions(
    kills: Sequence[Kill] | None, executions: pl.DataFrame, commits: pl.DataFrame
) -> Iterator[str]:
    """Rows that ran and were lost, rows that ran when they were done, and rows that ran again
    without one of `kills`, whose reach is known; None: rows may run again for other reasons."""
    at, epoch = pl.col("at"), pl.col("epoch")
    facts = (pl.len(), epoch.n_unique(), at.min().alias("first"), at.max().alias("last"))
    runs = executions.group_by(ROW).agg(*facts).join(commits, on=ROW, how="left").sort(ROW)
    for job, row, num_runs, num_epochs, first, last, committed_at in runs.iter_rows():
        if committed_at is None:
            yield f"{job}, row {row}: ran and has no result"
        elif last > committed_at:
            yield f"{job}, row {row}: an execution began after its result was committed"
        if kills is not None:
            end = committed_at or 0.0
            again = last if num_epochs > 1 else first
            cuts = [k for k in kills if k.cuts and _reaches(k, first, again, end)]
            num_ends = sum(kill.ends_engine for kill in cuts)
            if num_runs - 1 > len(cuts) or num_runs - num_epochs > num_ends:
                yield f"{job}, row {row}: ran {num_runs} times, cut {len(cuts)} times"
    num_extra = len(executions) - len(runs)
    if kills is not None and num_extra > count_explained(kills):
        yield f"{num_extra} executions too many, and the kills explain {count_explained(kills)}"


def _reaches(kill: Kill, first: float, again: float, end: float) -> bool:
    """Whether a kill may have cut what ran from `first` to `end`. What a dead daemon had sent may
    begin after its successor was started: then that one sent it `again` after the kill."""
    began = first <= kill.ended_at or (not kill.ends_engine and first != again >= kill.at)
    return began and kill.at <= end


def count_explained(kills: Sequence[Kill]) -> int:
    """The executions beyond one a row that the kills explain."""
    return sum(kill.num_uncommitted for kill in kills if kill.cuts)


def check_output(
    path: Path,
    name: str,
    num_rows: int,
    *,
    is_completed: bool = True,
    has_known_answers: bool = True,
) -> Iterator[str]:
    """Whether a file holds every row once, in order; where the job was completed, each with the
    answer to its own prompt."""
    rows = read_output(path) if path.exists() else []
    if [row["id"] for row in rows] != [f"{name}-{row}" for row in range(num_rows)]:
        yield f"{path.name}: not every row once and in order ({len(rows)} of {num_rows})"
        return
    for number, row in enumerate(rows if is_completed else ()):
        wanted = expected_answer(prompt(name, number)) if has_known_answers else row["response"]
        if row["error"] or not wanted or row["response"] != wanted:
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


def check_home(deployment: Deployment) -> Iterator[str]:
    """What `batchrun store check` finds, read here in one process: inside, and the jobs' files."""
    home = deployment.home
    if home.has_store:
        with closing(open_to_read(home.store_location)) as store:
            yield from map(str, check_store(store))
            yield from map(str, check_files(readable_jobs(store), links=home.inputs))


def check_leftovers(deployment: Deployment) -> Iterator[str]:
    """Temporary files and processes that outlived a deployment which was ended."""
    folder = deployment.folder
    for path in (path for pattern in LEFTOVERS for path in folder.rglob(pattern)):
        yield f"{path.relative_to(folder)}: a temporary file was left"
    for pid in deployment.find_orphans():
        yield f"process {pid}: runs on after `batchrun down`"
