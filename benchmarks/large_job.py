"""One job of millions of rows from submit to output: times, memory, disk.

    python -m benchmarks.large_job [--rows N] [--row-tokens N] [--live N] [--folder PATH]
        [--json FILE]

A deployment with fake engines behind four agents. The job is submitted and planned, and its first
rows run. Then it is brought down, and results for all but the last `--live` rows are put into the
store as the daemon puts them there: engines of this machine would take hours for them. `up` goes on
with the rest; while they run the daemon is killed, and started again; then the output is written.
`--folder` should be on a disk, with room for a kilobyte a row, or with `--row-tokens`, which makes
each prompt about so long, for four times its text.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import fmean

import numpy as np
import psutil
import pyarrow.parquet as pq
import zstandard

from batchrun.store import jobs, results
from batchrun.store.database import Store, open_store
from batchrun.types import Outcome, OutcomeKind, Usage
from benchmarks.deployment import ROW_GROUP_ROWS, Deployment, prompt, wait_until
from benchmarks.records import Bar, Record, Spent, finish, parser, shown

ROWS = 20_000_000
LATENCY_S = 0.1
NUM_AGENTS = 4
COMMIT_ROWS = 2_000
LONG_GROUP_ROWS = 20_000
BYTES_PER_TOKEN = 4
NUM_WORDS, WORD_LETTERS, BOOK_WORDS = 20_000, (2, 8), 10_000_000
SAMPLE_ROWS = 1_000
POLL_S = 0.1
FIRST_S = 30.0
MOST_WAIT_S = 7_200.0
BODY = (
    '{"id":"chatcmpl-%032x","object":"chat.completion","created":1790000000,"model":"default",'
    '"choices":[{"index":0,"message":{"role":"assistant","content":"%s"},"logprobs":null,'
    '"finish_reason":"length"}],"usage":{"prompt_tokens":24,"total_tokens":32,'
    '"completion_tokens":8}}'
)


def main() -> int:
    """Run it, print and save. Exits 1 when a bar is missed."""
    options = parser(
        __doc__, rows=ROWS, row_tokens=0, live=100_000, folder=Path(tempfile.gettempdir())
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchrun-large-", dir=given.folder) as folder:
        measured = measure(Deployment(Path(folder)), given.rows, given.row_tokens, given.live)
    records = shown([measured])
    return finish(given.json, records, bars(records[0]))


def bars(record: Record) -> Iterator[Bar]:
    """What a job of 20 million rows must keep."""
    most_gib = max(record["submit_peak_gib"], record["daemon_peak_gib"])
    yield Bar("most memory of a process, GiB", most_gib, 5, is_most=True)
    yield Bar("plan, s", record["plan_s"], 300, is_most=True)
    yield Bar("goes on after kill -9, s", record["resume_s"], 60, is_most=True)
    own_bytes = record["store_bytes_per_row"] - record["reply_bytes_per_row"]
    yield Bar("store besides replies, bytes a row", own_bytes, 400, is_most=True)
    yield Bar("output, s", record["output_s"], 600, is_most=True)


def measure(deployment: Deployment, num_rows: int, row_tokens: int, num_live: int) -> Record:
    """The job from start to end."""
    deployment.use_agents(NUM_AGENTS, LATENCY_S, window={"requests": 256, "tokens": 2_000_000})
    text = documents(row_tokens * BYTES_PER_TOKEN) if row_tokens else prompt
    group_rows = LONG_GROUP_ROWS if row_tokens else ROW_GROUP_ROWS
    job = deployment.write_job("large", num_rows, text=text, group_rows=group_rows)
    peaks: dict[str, int] = {}
    with _running(deployment):
        with Spent() as submitting:
            command = deployment.popen("submit", job.name)
            with _watched(peaks, "submit", lambda: command.pid):
                assert command.wait() == 0
        with Spent() as planning, _watched(peaks, "daemon", lambda: deployment.pid_of("daemon")):
            _until_more_than(deployment, 0)
        began_s, num_first = time.monotonic(), _num_done(deployment)
        time.sleep(FIRST_S)
        rows_per_s = (_num_done(deployment) - num_first) / (time.monotonic() - began_s)
    with closing(open_store(deployment.home.store_location)) as store, Spent() as filling:
        num_filled = fill(store, num_rows, num_live)
    store_bytes = sum(
        file.stat().st_size for file in deployment.home.path.glob("*.db*") if file.is_file()
    )
    with _watched(peaks, "daemon", lambda: deployment.pid_of("daemon")), _running(deployment):
        _until_more_than(deployment, num_filled)
        deployment.kill("daemon")
        with Spent() as resuming:
            deployment.start()
            _until_more_than(deployment, _num_done(deployment))
        wait_until(lambda: _state(deployment) != "running", "the rows", MOST_WAIT_S, POLL_S)
        with Spent() as exporting:
            wait_until(lambda: _state(deployment) == "completed", "the job", MOST_WAIT_S, POLL_S)
    with pq.ParquetFile(deployment.folder / "large.out.parquet") as output:
        assert output.metadata.num_rows == num_rows
    return {
        "rows": num_rows,
        "row_tokens": row_tokens,
        "input_bytes_per_row": (deployment.folder / "large.in.parquet").stat().st_size / num_rows,
        "submit_s": submitting.wall_s,
        "plan_s": planning.wall_s,
        "rows_per_s": rows_per_s,
        "fill_s": filling.wall_s,
        "resume_s": resuming.wall_s,
        "output_s": exporting.wall_s,
        "submit_peak_gib": peaks["submit"] / 2**30,
        "daemon_peak_gib": peaks["daemon"] / 2**30,
        "store_bytes_per_row": store_bytes / num_filled,
        "reply_bytes_per_row": _mean_reply_bytes(),
        "output_bytes_per_row": (deployment.folder / "large.out.parquet").stat().st_size / num_rows,
    }


def documents(num_bytes: int) -> Callable[[str, int], str]:
    """Texts of that length, no two alike: a short question, then a passage from anywhere in a book
    whose words are as frequent as in English (Zipf's law)."""
    rng = np.random.default_rng(0)
    letters = rng.integers(ord("a"), ord("z") + 1, (NUM_WORDS, WORD_LETTERS[1]), np.uint8)
    lengths = rng.integers(*WORD_LETTERS, NUM_WORDS, endpoint=True)
    words = [bytes(row[:size]).decode() for row, size in zip(letters, lengths, strict=True)]
    share = 1 / np.arange(1, NUM_WORDS + 1)
    chosen = rng.choice(NUM_WORDS, BOOK_WORDS, p=share / share.sum())
    book = " ".join(map(words.__getitem__, chosen.tolist()))

    def text(name: str, row: int) -> str:
        start = row * 7919**4 % (len(book) - num_bytes)
        return f"{prompt(name, row)} {book[start : start + num_bytes]}"

    return text


@contextmanager
def _running(deployment: Deployment) -> Iterator[None]:
    for name in deployment.agents:
        deployment.start_agent(name)
    with deployment.running():
        yield


def fill(store: Store, num_rows: int, num_live: int) -> int:
    """Put results for the rows that have none, but for the last, into the store; how many have one
    then."""
    (record,) = jobs.list_jobs(store)
    done = set(results.done_rows(store, record.seq).tolist())
    batch = []
    for row in range(num_rows - num_live):
        if row in done:
            continue
        outcome = Outcome(
            record.id,
            row,
            1,
            OutcomeKind.OK,
            body=reply(row),
            finish_reason="length",
            usage=Usage(24, 8, 0),
        )
        batch.append((record.seq, outcome))
        if len(batch) == COMMIT_ROWS:
            results.commit(store, batch, now_s=time.time())
            batch.clear()
    results.commit(store, batch, now_s=time.time())
    return results.count(store, record.seq).num_done


def reply(row: int) -> bytes:
    """What the engine is said to have answered."""
    return (BODY % (row * 7919**8 % 2**128, f"answer {row % 977} to it")).encode()


def _mean_reply_bytes() -> float:
    """Of a reply as it is stored."""
    compressor = zstandard.ZstdCompressor(level=results.COMPRESSION_LEVEL, write_checksum=True)
    return fmean(len(compressor.compress(reply(row))) for row in range(SAMPLE_ROWS))


def _until_more_than(deployment: Deployment, num_rows: int) -> None:
    """Wait until more rows than that have ended."""

    def has_more() -> bool:
        return _state(deployment) == "running" and _num_done(deployment) > num_rows

    wait_until(has_more, "rows to end", MOST_WAIT_S, POLL_S)


def _num_done(deployment: Deployment) -> int:
    (view,) = deployment.client.get("/status")["jobs"]
    return int(view["num_completed"]) + int(view["num_failed"])


def _state(deployment: Deployment) -> str:
    return str(deployment.client.get("/status")["jobs"][0]["state"])


@contextmanager
def _watched(peaks: dict[str, int], name: str, pid: Callable[[], int]) -> Iterator[None]:
    """Note the most memory that was resident in a process, which may be started anew meanwhile."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            with suppress(psutil.Error):
                resident = psutil.Process(pid()).memory_info().rss
                peaks[name] = max(peaks.get(name, 0), resident)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
