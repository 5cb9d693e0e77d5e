"""What the store costs: results committed per second, memory, resuming, and the output file.

    python -m benchmarks.store [--rows N] [--order NAME ...] [--folder PATH] [--json FILE]

Results of about one kilobyte go through the daemon's writer into a store on disk, in a process of
its own, as fast as it takes them; at most `OUTSTANDING_ROWS` are not committed yet, as in a daemon
whose engines' windows are full. `shuffled`: rows end in a random order, the worst for an index;
`input`: in the order of the input. Then the same process reads what a daemon needs to go on with
the job (`resume_s`), writes its Parquet output (`export_s`), and backs the store up and checks it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.daemon.ending import export
from batchrun.daemon.writer import Entry, ResultWriter
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.samples.prose import sentence_pool
from batchrun.store import jobs, results
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store, open_to_read
from batchrun.store.jobs import JobRecord
from batchrun.store.retention import write_snapshot
from batchrun.types import JobState, Outcome, OutcomeKind, Usage
from benchmarks.records import Bar, describe, finish, in_own_process, parser

BODY_BYTES = 1_024
POOL_SENTENCES = 20_000
BATCH_ROWS = 10_000
PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS = 220, 130, 160

JOB_FILE = """\
name: store
input:
  path: rows.parquet
  id: id
  messages:
    - {role: user, content: "{{ question }}"}
output: {path: out.parquet, keep: [question]}
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """What `write_workload` left in `folder`."""

    folder: Path
    num_rows: int

    @property
    def job_file(self) -> Path:
        """The job file."""
        return self.folder / "job.yaml"

    @property
    def bodies(self) -> Path:
        """The bodies, end to end."""
        return self.folder / "bodies.bin"

    @property
    def ends(self) -> Path:
        """Where each body ends."""
        return self.folder / "ends.npy"


def write_workload(folder: Path, num_rows: int) -> Workload:
    """Write the job file, its input and a body of about `BODY_BYTES` for every row."""
    workload = Workload(folder, num_rows)
    rng = Random(0)
    sentences = [json.dumps(text)[1:-1] for text in sentence_pool(rng, POOL_SENTENCES)]
    workload.job_file.write_text(JOB_FILE)
    ends = np.zeros(num_rows, dtype=np.int64)
    schema = pa.schema([("id", pa.string()), ("question", pa.string())])
    written_bytes = 0
    with (
        workload.bodies.open("wb") as file,
        pq.ParquetWriter(folder / "rows.parquet", schema) as questions,
    ):
        for start in range(0, num_rows, BATCH_ROWS):
            rows = range(start, min(start + BATCH_ROWS, num_rows))
            asked = [rng.choice(sentences) for _ in rows]
            questions.write_table(pa.table([[f"row-{row}" for row in rows], asked], schema=schema))
            for row in rows:
                written_bytes += file.write(_body(row, sentences, rng))
                ends[row] = written_bytes
    np.save(workload.ends, ends)
    return workload


def outcomes(workload: Workload, order: npt.NDArray[np.int64]) -> Iterator[Outcome]:
    """Every row's outcome, in `order`; body i goes to the row that comes i-th."""
    ends = np.load(workload.ends, mmap_mode="r")
    begins = 0
    with workload.bodies.open("rb") as file:
        for start in range(0, len(order), BATCH_ROWS):
            piece = slice(start, start + BATCH_ROWS)
            for row, end in zip(order[piece].tolist(), ends[piece].tolist(), strict=True):
                yield _outcome(row, file.read(end - begins))
                begins = end


def _outcome(row: int, body: bytes) -> Outcome:
    return Outcome(
        job_id="job_store",
        row=row,
        attempt=1,
        kind=OutcomeKind.OK,
        body=body,
        finish_reason="stop",
        usage=Usage(PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS),
        duration_s=1.25,
    )


def _body(row: int, sentences: list[str], rng: Random) -> bytes:
    """A chat completion as vLLM writes one."""
    head = (
        f'{{"id":"chatcmpl-{rng.getrandbits(128):032x}","object":"chat.completion","created":'
        f'{1_790_000_000 + row // 50},"model":"default","choices":[{{"index":0,"message":'
        '{"role":"assistant","content":"'
    )
    tail = (
        '","refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[],'
        '"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
        f'"usage":{{"prompt_tokens":{PROMPT_TOKENS},"total_tokens":'
        f'{PROMPT_TOKENS + OUTPUT_TOKENS},"completion_tokens":{OUTPUT_TOKENS},'
        f'"prompt_tokens_details":{{"cached_tokens":{CACHED_TOKENS}}}}}}}'
    )
    length = len(head) + len(tail)
    parts: list[str] = []
    while length < BODY_BYTES:
        parts.append(sentences[int(rng.random() * len(sentences))])
        length += len(parts[-1]) + 1
    return f"{head}{' '.join(parts)}{tail}".encode()


Record = dict[str, object]
Result = TypeVar("Result")

FULL_ROWS = 1_000_000
NUM_RETRIED = 1_000
OUTSTANDING_ROWS = 8_192
ORDERS = ("shuffled", "input")


def main() -> int:
    """Measure each order in a process of its own, print and save. Exits 1 when a bar is missed."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, default=FULL_ROWS)
    made.add_argument("--order", nargs="+", choices=ORDERS, default=list(ORDERS))
    made.add_argument("--folder", type=Path, help="where to put the store; a disk, not memory")
    options = made.parse_args()
    records: list[Record] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        workload = in_own_process(write_workload, Path(scratch), options.rows)
        for order in options.order:
            record = in_own_process(measure, workload, order)
            records.append(record)
            print(describe(record), flush=True)
    judged = records if options.rows == FULL_ROWS else []
    return finish(options.json, records, [bar for record in judged for bar in bars(record)])


def bars(record: Record) -> Iterator[Bar]:
    """What a million results must keep."""
    values = {key: float(str(value)) for key, value in record.items() if key != "order"}
    yield Bar("committed results per s", values["commits_per_s"], 10_000)
    yield Bar("resident, MB", values["peak_rss_bytes"] / 1e6, 400, is_most=True)
    yield Bar("resume, s", values["resume_s"], 5, is_most=True)
    yield Bar("export, s", values["export_s"], 60, is_most=True)


def measure(workload: Workload, order: str) -> Record:
    """Write all results, resume, export, back up and check; the store is removed again."""
    home = workload.folder / order
    home.mkdir()
    store = open_store(home / "store.db")
    job = _submitted(store, workload, home)
    written = _clocked(lambda: asyncio.run(_write(store, job, workload, order)))
    write_rss_bytes = _peak_rss_bytes()
    store.close()
    resumed = _clocked(lambda: _resume(home / "store.db", job, workload.num_rows))
    store = resumed.result
    finalizing = jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=time.time())
    exported = _clocked(lambda: export(store, finalizing, links=home / "inputs"))
    assert exported.result == workload.num_rows
    peak_rss_bytes = _peak_rss_bytes()
    copied = _clocked(lambda: _back_up(store, home / "backup.db"))
    checked = _clocked(lambda: _check(home / "backup.db"))
    store.close()
    store_bytes = sum(path.stat().st_size for path in home.glob("store.db*"))
    shutil.rmtree(home)
    return {
        "rows": workload.num_rows,
        "order": order,
        "body_bytes": workload.bodies.stat().st_size / workload.num_rows,
        "store_bytes": store_bytes,
        "commits_per_s": workload.num_rows / written.wall_s,
        "commits_per_cpu_s": workload.num_rows / written.cpu_s,
        "ack_p50_s": float(np.quantile(written.result, 0.5)),
        "ack_p99_s": float(np.quantile(written.result, 0.99)),
        "write_rss_bytes": write_rss_bytes,
        "peak_rss_bytes": peak_rss_bytes,
        "resume_s": resumed.wall_s,
        "resume_cpu_s": resumed.cpu_s,
        "export_s": exported.wall_s,
        "export_cpu_s": exported.cpu_s,
        "backup_s": copied.wall_s,
        "check_s": checked.wall_s,
    }


@dataclass(frozen=True, slots=True)
class Clocked(Generic[Result]):
    """What some work gave, and what it took; CPU time is that of all threads."""

    result: Result
    wall_s: float
    cpu_s: float


def _clocked(work: Callable[[], Result]) -> Clocked[Result]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return Clocked(result, time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def _submitted(store: Store, workload: Workload, home: Path) -> JobRecord:
    """The job, running, with a few rows that were retried."""
    spec = load_job_file(workload.job_file, cwd=home)
    job = jobs.create(store, prepare_job(spec, links=home / "inputs"), now_s=time.time())
    for row in range(0, workload.num_rows, -(-workload.num_rows // NUM_RETRIED)):
        results.record_attempt(store, job.seq, row, 1)
    return jobs.start(store, job.id, now_s=time.time())


async def _write(
    store: Store, job: JobRecord, workload: Workload, order: str
) -> npt.NDArray[np.float64]:
    """Each row's seconds from being handed over to its commit, in the order of both."""
    handed_over_s = np.zeros(workload.num_rows)
    acknowledged_s = np.zeros(workload.num_rows)
    num_acknowledged = 0
    room = asyncio.Event()

    def on_committed(batch: Sequence[Entry]) -> None:
        nonlocal num_acknowledged
        acknowledged_s[num_acknowledged : num_acknowledged + len(batch)] = time.perf_counter()
        num_acknowledged += len(batch)
        room.set()

    rows = np.arange(workload.num_rows)
    if order == "shuffled":
        np.random.default_rng(0).shuffle(rows)
    writer = ResultWriter(store, on_committed)
    running = asyncio.create_task(writer.run())
    for index, outcome in enumerate(outcomes(workload, rows)):
        while index - num_acknowledged >= OUTSTANDING_ROWS:
            room.clear()
            await room.wait()
        handed_over_s[index] = time.perf_counter()
        writer.put(job.seq, outcome)
    await writer.flush()
    running.cancel()
    return acknowledged_s - handed_over_s


def _resume(path: Path, job: JobRecord, num_rows: int) -> Store:
    """Open the store and read what a new daemon needs of a job before it runs what is left."""
    store = open_store(path)
    jobs.begin_epoch(store, pid=os.getpid(), now_s=time.time())
    counts = results.count(store, job.seq)
    done = results.done_rows(store, job.seq)
    attempts = results.attempts_so_far(store, job.seq)
    deaths = results.engine_deaths(store, job.seq)
    assert (counts.num_done, len(done), len(deaths)) == (num_rows, num_rows, 0)
    assert len(attempts) == min(num_rows, NUM_RETRIED)
    return store


def _back_up(store: Store, path: Path) -> None:
    path.touch()
    write_snapshot(store, path)


def _check(path: Path) -> None:
    store = open_to_read(path)
    assert list(check_store(store)) == []
    store.close()


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
