"""What floods of callers and engines cost the daemon: how late its loop is, memory, who waits.

    python -m benchmarks.resources [--load NAME ...] [--json FILE]

Each load has a deployment with the fake engine of its own: 1,000 slow uploads, 16 uploads of 64 MiB
in one line with a batch each, 1,200 replies of 1.5 MB, 200 batches made at once, 10,000 files.
Another process asks the daemon's `/healthz` all the time: a loop that is late answers late. What
the two waited for a core is taken off: the machine's doing, and not the loop's. An answer is waited
for from the last byte that was sent, or from the first where it comes before that.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import requests

from benchmarks.deployment import MODEL, Deployment
from benchmarks.records import Bar, Record, finish, parser, shown

PROBE_S = 0.05
MAX_LATE_S = 0.25
MAX_MEMORY_MB = 600
MAX_WAIT_S = 10.0
NUM_SLOW, DRIP, DRIP_S, NUM_DRIPS = 1_000, b"x" * 2_000, 1.0, 10
NUM_LINES, LINE_BYTES = 16, 64 << 20
NUM_REPLIES, REPLY_BYTES = 1_200, 1_500_000
NUM_BATCHES, NUM_FILES, NUM_CLIENTS = 200, 10_000, 16
ENDPOINT = "/v1/chat/completions"
LINE = {"custom_id": "a", "method": "POST", "url": ENDPOINT}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TIMEOUT = aiohttp.ClientTimeout(total=900)


@dataclass(slots=True)
class SentAt:
    """When the last byte of a body went; None: not yet."""

    at_s: float | None = None


Late = tuple[float, float]
"""Seconds that an answer took, and what of it was waited for a core."""
Pieces = Callable[[SentAt], AsyncIterator[bytes]]


@dataclass(slots=True)
class Answers:
    """The statuses of a load's calls, how long each was waited for, and 503s without an hour."""

    session: aiohttp.ClientSession
    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    num_without_hour: int = 0

    async def ask(
        self, method: str, path: str, sent: SentAt | None = None, **options: Any
    ) -> dict[str, Any]:
        """The answer as JSON; counted. `sent` knows when the last byte went."""
        began_s = time.monotonic()
        async with self.session.request(method, f"{self.url}/v1{path}", **options) as reply:
            last_s = began_s if sent is None or sent.at_s is None else sent.at_s
            self.waits_s.append(time.monotonic() - last_s)
            self.statuses[reply.status] += 1
            self.num_without_hour += reply.status == 503 and "Retry-After" not in reply.headers
            found: dict[str, Any] = await reply.json()
            return found

    async def upload(self, pieces: Pieces, purpose: str) -> str:
        """The id of a file of these pieces; "" where it was refused."""
        sent = SentAt()
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", pieces(sent), filename="in.jsonl")
        found = await self.ask("POST", "/files", sent, data=form)
        return str(found.get("id", ""))

    async def make_batch(self, file_id: str) -> dict[str, Any]:
        """A batch of this file."""
        wanted = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        return await self.ask("POST", "/batches", json=wanted)


async def slow_uploads(answers: Answers) -> None:
    """Each goes on whatever is answered."""

    async def drips(sent: SentAt) -> AsyncIterator[bytes]:
        for _ in range(NUM_DRIPS):
            yield DRIP
            await asyncio.sleep(DRIP_S)
        sent.at_s = time.monotonic()

    await asyncio.gather(*(answers.upload(drips, "user_data") for _ in range(NUM_SLOW)))


async def long_lines(answers: Answers) -> None:
    """Each a batch's input, of one line that is no request."""
    piece = b"{}," * (1 << 18)

    async def line(sent: SentAt) -> AsyncIterator[bytes]:
        yield b'{"x":['
        for _ in range(LINE_BYTES // len(piece) - 1):
            yield piece
        yield b"{}]}\n"
        sent.at_s = time.monotonic()

    async def one() -> None:
        file_id = await answers.upload(line, "batch")
        if file_id:
            await answers.make_batch(file_id)

    await asyncio.gather(*(one() for _ in range(NUM_LINES)))


async def many_batches(answers: Answers) -> None:
    """All at once, of one file."""
    file_id = await answers.upload(whole(jsonl(20)), "batch")
    await asyncio.gather(*(answers.make_batch(file_id) for _ in range(NUM_BATCHES)))


async def many_files(answers: Answers) -> None:
    """From a few clients, one after the other; then all are listed, at once and by pages."""
    left = iter(range(NUM_FILES))

    async def client() -> None:
        for _ in left:
            await answers.upload(whole(b"a file"), "user_data")

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    await answers.ask("GET", "/files?limit=10000")
    page = await answers.ask("GET", "/files?limit=100")
    while page["has_more"]:
        page = await answers.ask("GET", f"/files?limit=100&after={page['last_id']}")


async def long_replies(answers: Answers) -> None:
    """A batch whose every answer is long."""
    file_id = await answers.upload(whole(jsonl(NUM_REPLIES)), "batch")
    batch = await answers.make_batch(file_id)
    while batch["status"] not in {"completed", "failed"}:
        await asyncio.sleep(0.5)
        batch = await answers.ask("GET", f"/batches/{batch['id']}")


LOADS: dict[str, Callable[[Answers], Awaitable[None]]] = {
    "slow uploads": slow_uploads,
    "long lines": long_lines,
    "long replies": long_replies,
    "batches at once": many_batches,
    "files": many_files,
}


def jsonl(num_rows: int) -> bytes:
    """The input of a batch."""
    lines = (json.dumps(LINE | {"custom_id": str(row), "body": BODY}) for row in range(num_rows))
    return "".join(f"{line}\n" for line in lines).encode()


def whole(content: bytes) -> Pieces:
    """A file in one piece."""

    async def pieces(sent: SentAt) -> AsyncIterator[bytes]:
        yield content
        sent.at_s = time.monotonic()

    return pieces


def main() -> int:
    """Run the loads, print the bars."""
    options = parser(__doc__, load=tuple(LOADS)).parse_args()
    records = shown(_all(options.load))
    bars = [bar for record in records for bar in _bars(record)]
    return finish(options.json, records, bars)


def _bars(record: Record) -> Iterator[Bar]:
    name = record["load"]
    yield Bar(f"{name}: loop, latest in s", record["late_max_s"], MAX_LATE_S, is_most=True)
    yield Bar(f"{name}: memory, most in MB", record["memory_mb"], MAX_MEMORY_MB, is_most=True)
    yield Bar(f"{name}: longest wait in s", record["wait_max_s"], MAX_WAIT_S, is_most=True)
    yield Bar(f"{name}: other errors", record["other_errors"], 0, is_most=True)


def _all(names: list[str]) -> Iterator[Record]:
    for name in names:
        with tempfile.TemporaryDirectory(prefix="batchrun-resources-") as folder:
            yield measure(Deployment(Path(folder)), name)


def measure(deployment: Deployment, name: str) -> Record:
    """One load, from a fresh deployment to the last answer."""
    choice = {"index": 0, "message": {"content": "a" * REPLY_BYTES}, "finish_reason": "stop"}
    text = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 8}})
    rules = [{"match": {}, "action": {"status": 200, "body": text}}]
    deployment.use_fake_engine(0.0, rules=rules if name == "long replies" else [])
    with deployment.running():
        address = deployment.home.read_daemon_address()
        assert address is not None
        is_over = multiprocessing.Event()
        late_s: multiprocessing.Queue[list[Late]] = multiprocessing.Queue()
        where = (address.url, deployment.pid_of("daemon"))
        prober = multiprocessing.Process(target=probe, args=(*where, is_over, late_s))
        prober.start()
        began_s = time.monotonic()
        answers = asyncio.run(_load(deployment.url, LOADS[name]))
        duration_s = time.monotonic() - began_s
        is_over.set()
        lates = np.array(late_s.get(timeout=120))
        own = np.maximum(lates[:, 0] - lates[:, 1], 0)
        prober.join()
        memory_mb = high_water_mb(deployment.pid_of("daemon"))
    errors = sum(n for status, n in answers.statuses.items() if status >= 500 and status != 503)
    return {
        "load": name,
        "duration_s": duration_s,
        "late_max_s": float(own.max()),
        "late_p99_s": float(np.percentile(own, 99)),
        "answer_max_s": float(lates[:, 0].max()),
        "memory_mb": memory_mb,
        "answers": sum(answers.statuses.values()),
        "num_503": answers.statuses[503],
        "other_errors": errors + answers.num_without_hour,
        "wait_max_s": max(answers.waits_s),
    }


async def _load(url: str, load: Callable[[Answers], Awaitable[None]]) -> Answers:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        answers = Answers(session, url)
        await load(answers)
        return answers


def probe(url: str, pid: int, is_over: Event, late_s: multiprocessing.Queue[list[Late]]) -> None:
    """How long the daemon takes for its easiest answer, again and again."""
    found = []
    with requests.Session() as session:
        while not is_over.is_set():
            before_s, began_s = waited_for_core_s(pid), time.monotonic()
            session.get(f"{url}/healthz", timeout=600)
            took_s = time.monotonic() - began_s
            found.append((took_s, waited_for_core_s(pid) - before_s))
            time.sleep(PROBE_S)
    late_s.put(found)


def waited_for_core_s(pid: int) -> float:
    """For how long the daemon's loop and this process could have run and did not, since they
    began."""
    paths = (f"/proc/{pid}/task/{pid}/schedstat", "/proc/thread-self/schedstat")
    return sum(int(Path(path).read_text().split()[1]) / 1e9 for path in paths)


def high_water_mb(pid: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    raise SystemExit(main())
