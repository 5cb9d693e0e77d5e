"""What the store costs: results committed per second, memory, resuming, and the output file.

    python -m benchmarks.store [--rows N] [--folder PATH] [--json FILE]

Results of about one kilobyte go through the daemon's writer into a store on disk, in a process of
its own, as fast as it takes them; at most `OUTSTANDING_ROWS` are not committed yet, as in a daemon
whose engines' windows are full. `shuffled`: rows end in a random order, the worst for an index;
`input`: in the order of the input. Then the same process reads what a daemon needs to go on with
the job (`resume_s`) and writes its Parquet output (`export_s`). `--folder` should be on a disk.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

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
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState, Outcome, OutcomeKind, Usage
from benchmarks.records import Bar, Record, Spent, finish, in_own_process, parser, peak_bytes, shown

FULL_ROWS = 1_000_000
NUM_RETRIED = 1_000
OUTSTANDING_ROWS = 8_192
ORDERS = ("shuffled", "input")
POOL_SENTENCES = 20_000
SENTENCES_A_BODY = 24
GROUP_ROWS = 10_000
BODY_BYTES = 1_024
BODY = (
    '{"id":"chatcmpl-%032x","object":"chat.completion","created":1790000000,"model":"default",'
    '"choices":[{"index":0,"message":{"role":"assistant","content":"%s","refusal":null,'
    '"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning":null},'
    '"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":220,'
    '"total_tokens":350,"completion_tokens":130,"prompt_tokens_details":{"cached_tokens":160}}}'
)
"""A chat completion as vLLM writes one."""
CONTENT_BYTES = BODY_BYTES - len(BODY % (0, ""))
USAGE = Usage(220, 130, 160)

JOB_FILE = """\
name: store
input:
  path: rows.parquet
  id: id
  messages:
    - {role: user, content: "{{ question }}"}
output: {path: out.parquet, keep: [question]}
"""


def write_workload(folder: Path, num_rows: int) -> None:
    """Write `JOB_FILE` as job.yaml, its input, and a body of `BODY_BYTES` for every row, end to end
    as bodies.bin."""
    rng = Random(0)
    # None that JSON escapes, so that they can be cut anywhere.
    drawn = sentence_pool(rng, POOL_SENTENCES)
    sentences = [text for text in drawn if text.isascii() and '"' not in text]
    ids = [f"row-{row}" for row in range(num_rows)]
    table = pa.table({"id": ids, "question": rng.choices(sentences, k=num_rows)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=GROUP_ROWS)
    (folder / "job.yaml").write_text(JOB_FILE)
    with (folder / "bodies.bin").open("wb") as file:
        for _ in range(num_rows):
            text = " ".join(rng.choices(sentences, k=SENTENCES_A_BODY))[:CONTENT_BYTES]
            body = BODY % (rng.getrandbits(128), text.ljust(CONTENT_BYTES))
            file.write(body.encode())


def outcomes(folder: Path, order: npt.NDArray[np.int64]) -> Iterator[Outcome]:
    """Every row's outcome, in `order`; body i goes to the row that comes i-th."""
    with (folder / "bodies.bin").open("rb") as file:
        for row in order:
            yield Outcome(
                job_id="job_store",
                row=int(row),
                attempt=1,
                kind=OutcomeKind.OK,
                body=file.read(BODY_BYTES),
                finish_reason="stop",
                usage=USAGE,
                duration_s=1.25,
            )


def main() -> int:
    """Measure each order in a process of its own, print and save. Exits 1 when a bar is missed."""
    options = parser(__doc__, rows=FULL_ROWS, folder=Path(tempfile.gettempdir())).parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        in_own_process(write_workload, folder, options.rows)
        records = shown(in_own_process(measure, folder, options.rows, order) for order in ORDERS)
    judged = records if options.rows == FULL_ROWS else []
    return finish(options.json, records, [bar for record in judged for bar in bars(record)])


def bars(record: Record) -> Iterator[Bar]:
    """What a million results must keep."""
    yield Bar("committed results per s", record["commits_per_s"], 10_000)
    yield Bar("resident, MB", record["peak_rss_bytes"] / 1e6, 400, is_most=True)
    yield Bar("resume, s", record["resume_s"], 5, is_most=True)
    yield Bar("export, s", record["export_s"], 60, is_most=True)


def measure(folder: Path, num_rows: int, order: str) -> Record:
    """Write all results, resume and export; the store is removed again."""
    home = folder / order
    home.mkdir()
    with closing(open_store(home / "store.db")) as store:
        job = start_job(store, folder, cwd=home, links=home / "inputs")
        for row in range(0, num_rows, -(-num_rows // NUM_RETRIED)):
            results.record_attempt(store, job.seq, row, 1)
        rows = np.arange(num_rows)
        if order == "shuffled":
            np.random.default_rng(0).shuffle(rows)
        with Spent() as writing:
            acks_s = asyncio.run(_write(store, job, outcomes(folder, rows), num_rows))
    with Spent() as resuming:
        store = _resume(home / "store.db", job, num_rows)
    with closing(store):
        finalizing = jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=time.time())
        with Spent() as exporting:
            assert export(store, finalizing, links=home / "inputs") == num_rows
    store_bytes = sum(path.stat().st_size for path in home.glob("store.db*"))
    shutil.rmtree(home)
    return {
        "rows": num_rows,
        "order": order,
        "store_bytes": store_bytes,
        "commits_per_s": num_rows / writing.wall_s,
        "commits_per_cpu_s": num_rows / writing.cpu_s,
        "ack_p99_s": float(np.quantile(acks_s, 0.99)),
        "peak_rss_bytes": peak_bytes(),
        "resume_s": resuming.wall_s,
        "export_s": exporting.wall_s,
    }


def start_job(store: Store, folder: Path, *, cwd: Path, links: Path) -> JobRecord:
    """The job of `write_workload`, running; its output goes into `cwd`."""
    spec = load_job_file(folder / "job.yaml", cwd=cwd)
    job = jobs.create(store, prepare_job(spec, links=links), now_s=time.time())
    return jobs.start(store, job.id, now_s=time.time())


async def _write(
    store: Store, job: JobRecord, ended: Iterator[Outcome], num_rows: int
) -> npt.NDArray[np.float64]:
    """Each row's seconds from being handed over to its commit, in the order of both."""
    handed_over_s = np.zeros(num_rows)
    acknowledged_s = np.zeros(num_rows)
    num_acknowledged = 0
    room = asyncio.Event()

    def on_committed(batch: Sequence[Entry]) -> None:
        nonlocal num_acknowledged
        acknowledged_s[num_acknowledged : num_acknowledged + len(batch)] = time.perf_counter()
        num_acknowledged += len(batch)
        room.set()

    writer = ResultWriter(store, on_committed)
    running = asyncio.create_task(writer.run())
    for index, outcome in enumerate(ended):
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


if __name__ == "__main__":
    raise SystemExit(main())
