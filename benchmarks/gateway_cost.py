"""What the gateway adds to an answer, while the daemon is idle and while it is busy.

    python -m benchmarks.gateway_cost [--rows N] [--engine] [--json FILE]

32 streams go through the gateway of a whole deployment to an engine in a process of its own that
sends a chunk each 20 ms (`benchmarks.paced`), and 16 go to that engine directly at the
same time, from one process of callers (`benchmarks.paced`). A call's added TTFT is its TTFT
less the median of the direct ones in the same phase, and a chunk's added delay is the same with the
time from its sending to its arrival: what callers, engine and machine take beyond their median is
counted against the gateway. Phases: an idle daemon; the submission of a million rows; a file of
200 MiB and 50,000 lines uploaded, downloaded and validated; a million results written by the daemon
and by `batchrun results` at once; and `kill -9` of the daemon. Offline work is off, so that the
engine has no other calls. A phase's figures are of calls and chunks that began within it. All
files are in TMPDIR: a disk, not memory. `--engine` measures a real vLLM instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from openai import OpenAI

from batchrun.home import Home
from batchrun.simulator.replay import CallArrival, ReplayTarget, replay
from batchrun.store import jobs, results
from batchrun.store.database import open_store
from benchmarks.deployment import Deployment, wait_until
from benchmarks.paced import CHAT, GATEWAY_STREAMS, MODEL, Floats, load
from benchmarks.records import Bar, Record, describe, finish, in_own_process, parser
from benchmarks.store import outcomes, start_job, write_workload

FULL_ROWS = 1_000_000
WAIT_S = 600.0
PACED = (sys.executable, str(Path(__file__).with_name("paced.py")))
COMMIT_ROWS = 4_000
IDLE_S = 30.0
SETTLE_S = 3.0
FILE_LINES = 50_000
LINE_BYTES = 4_190
FILE_BYTES = FILE_LINES * LINE_BYTES
NUM_VALIDATIONS = 8
CALL_LIMIT_S = 120.0
NUM_PAIRS, WARM_PAIRS = 100, 5
MEDIAN_MS, P99_MS = 3.0, 15.0
BUSY_FACTOR = 2.0
VALIDATE_S, GROWTH_MB = 10.0, 60.0
BUSY = frozenset({"submit", "upload", "validate", "download", "export"})
JUDGED = frozenset({"idle", "submit", "validate", "export"})


def main() -> int:
    """Measure every phase, print and save. Exits 1 when a bar is missed."""
    options = parser(__doc__, rows=FULL_ROWS, engine=False).parse_args()
    with tempfile.TemporaryDirectory(prefix="batchrun-gateway-") as scratch:
        folder = Path(scratch)
        records = [measure_on_engine(folder)] if options.engine else measure(folder, options.rows)
    print(*map(describe, records), sep="\n")
    return finish(options.json, records, [bar for record in records for bar in bars(record)])


def bars(record: Record) -> Iterator[Bar]:
    """What a phase must keep."""
    phase = record["phase"]
    if phase in JUDGED:
        factor = BUSY_FACTOR if phase in BUSY else 1.0
        median, p99 = record["added_ttft_p50_ms"], record["added_ttft_p99_ms"]
        yield Bar(f"{phase}: median added TTFT, ms", median, factor * MEDIAN_MS, is_most=True)
        yield Bar(f"{phase}: p99 added TTFT, ms", p99, factor * P99_MS, is_most=True)
    if phase == "killed":
        yield Bar("streams that a kill met", record["calls_met"], GATEWAY_STREAMS)
    yield Bar(f"{phase}: calls that broke or came in disorder", record["broken"], 0, is_most=True)
    if "longest_s" in record:
        yield Bar("50,000 lines validated, s", record["longest_s"], VALIDATE_S, is_most=True)
    if "daemon_growth_bytes" in record:
        growth_mb = record["daemon_growth_bytes"] / 1e6
        yield Bar(f"{phase}: memory of the daemon, MB", growth_mb, GROWTH_MB, is_most=True)


@dataclass(slots=True)
class Phase:
    """What was measured in spans of CLOCK_MONOTONIC seconds; `more` are figures of its own.

    `busy_s` are processor seconds: of each process by its name, of the commands that the benchmark
    ran, and of all else on the machine.
    """

    name: str
    spans: list[tuple[float, float]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    load_1min: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    def record(self, calls: Floats, chunks: Floats) -> dict[str, Any]:
        """Of the calls and chunks that began within it; their columns: see `paced.Calls`."""
        calls, chunks = (table[self._covers(table[:, 1])] for table in (calls, chunks))
        through, direct = calls[calls[:, 0] == 1], calls[calls[:, 0] == 0]
        seconds = sum(end - begin for begin, end in self.spans)
        return {
            "phase": self.name,
            "seconds": seconds,
            "load_1min": self.load_1min,
            "calls": len(through),
            "direct_calls": len(direct),
            "broken": int((through[:, 4] == 0).sum()),
            **_quantiles("ttft", through[:, 2], direct[:, 2]),
            **_quantiles("chunk", chunks[chunks[:, 0] == 1, 2], chunks[chunks[:, 0] == 0, 2]),
            **{f"cores_{name}": busy_s / seconds for name, busy_s in self.busy_s.items()},
            **self.more,
        }

    def _covers(self, instants: Floats) -> np.ndarray:
        inside = [(instants >= begin) & (instants <= end) for begin, end in self.spans]
        covered: np.ndarray = np.any(inside, axis=0)
        return covered


def _quantiles(what: str, through_s: Floats, direct_s: Floats) -> dict[str, float]:
    """In milliseconds; a call without a first chunk counts as endless."""
    through_ms = np.where(np.isnan(through_s), np.inf, through_s) * 1e3
    direct_ms = direct_s[~np.isnan(direct_s)] * 1e3
    median_ms = float(np.quantile(direct_ms, 0.5))
    return {
        f"direct_{what}_p50_ms": median_ms,
        f"direct_{what}_p99_ms": float(np.quantile(direct_ms, 0.99)),
        f"added_{what}_p50_ms": float(np.quantile(through_ms, 0.5)) - median_ms,
        f"added_{what}_p99_ms": float(np.quantile(through_ms, 0.99)) - median_ms,
    }


class GatewayRig(Deployment):
    """`batchrun up` with the paced engine, and callers beside it, within `calling`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls_path = folder / "calls.npz"
        self.phases: dict[str, Phase] = {}
        self._client: subprocess.Popen[bytes] | None = None

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Calls all the time, on the gateway and on the engine itself; offline work is off."""
        port = self.engine_port
        self.configure({"command": [*PACED, f"--serve={port}"], "port": port})
        with self.running():
            self.batchrun("offline", "off")
            ports = (f"--gateway={self.port}", f"--direct={port}", f"--out={self.calls_path}")
            # As callers are: a session is what Linux shares processor time out among.
            with subprocess.Popen([*PACED, *ports], start_new_session=True) as self._client:
                try:
                    yield
                finally:
                    self._client.kill()

    def stop_calling(self) -> None:
        """Let calls end; what became of all is in `calls_path` then."""
        assert self._client is not None
        self._client.terminate()
        self._client.wait(timeout=WAIT_S)

    def wait_for_job(self, job_id: str, *states: str) -> None:
        """Until the job is in one of these states."""
        wait_until(lambda: self.job(job_id)["state"] in states, f"{job_id}: {states}", WAIT_S)

    def wait_for_batch(self, client: OpenAI, batch_id: str, status: str) -> None:
        """Until the batch has this status."""
        batches = client.batches
        wait_until(lambda: batches.retrieve(batch_id).status == status, f"{status} batch", WAIT_S)

    @contextmanager
    def watched(self, name: str) -> Iterator[dict[str, Any]]:
        """Add the time of the block to the phase `name`; its own figures go into what it gives."""
        print(f"gateway_cost: {name}", flush=True)
        phase = self.phases.setdefault(name, Phase(name))
        before, began_s = self._busy_s(), time.monotonic()
        yield phase.more
        phase.spans.append((began_s, time.monotonic()))
        phase.load_1min = os.getloadavg()[0]
        for part, busy_s in self._busy_s().items():
            phase.busy_s[part] = phase.busy_s.get(part, 0.0) + busy_s - before[part]

    def _busy_s(self) -> dict[str, float]:
        """Processor seconds so far; `others` is all that is not ours."""
        assert self._client is not None
        pids = {name: self.pid_of(name) for name in ("daemon", "gateway")}
        pids |= {"upstream": self.pid_of("engine"), "client": self._client.pid}
        found = {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["commands"] = ended.ru_utime + ended.ru_stime
        machine = psutil.cpu_times()
        busy_s = sum(machine[:8]) - machine.idle - machine.iowait
        found["others"] = busy_s - time.process_time() - sum(found.values())
        return found


def measure(folder: Path, num_rows: int) -> list[Record]:
    """All phases on a deployment in `folder`."""
    finished = in_own_process(write_finished_rows, folder, num_rows)
    rig = GatewayRig(folder)
    with rig.calling():
        time.sleep(SETTLE_S)
        with rig.watched("idle"):
            time.sleep(IDLE_S)
        submit(rig, num_rows)
        transfer_and_validate(rig)
        export(rig, finished)
        killed_s = time.monotonic()
        rig.kill("daemon")
        time.sleep(SETTLE_S)
        rig.stop_calling()
    calls, chunks = load(rig.calls_path)
    through = calls[calls[:, 0] == 1]
    met = through[(through[:, 1] < killed_s) & (through[:, 3] > killed_s)]
    after = through[through[:, 1] >= killed_s]
    killed = {
        "phase": "killed",
        "calls_met": len(met),
        "calls_after": len(after),
        "broken": int((met[:, 4] == 0).sum() + (after[:, 4] == 0).sum()),
    }
    return [*(phase.record(calls, chunks) for phase in rig.phases.values()), killed]


def write_finished_rows(folder: Path, num_rows: int) -> str:
    """A home with a paused job that has all of its results and no output file; the job's id."""
    write_workload(folder, num_rows)
    home = Home(folder / "home")
    home.create()
    with closing(open_store(home.store_location)) as store:
        job = start_job(store, folder, cwd=folder, links=home.inputs)
        entries = ((job.seq, outcome) for outcome in outcomes(folder, np.arange(num_rows)))
        while batch := list(islice(entries, COMMIT_ROWS)):
            results.commit(store, batch, now_s=time.time())
        jobs.pause(store, job.id, "its results are written")
    (folder / "bodies.bin").unlink()
    return job.id


def submit(rig: GatewayRig, num_rows: int) -> None:
    """A million rows: checked and pinned by the command, then read and ordered by the daemon."""
    job = rig.write_job("submitted", num_rows)
    with rig.watched("submit") as figures:
        began_s = time.monotonic()
        job_id = str(rig.batchrun("submit", job.name)["id"])
        figures["command_s"] = time.monotonic() - began_s
        rig.wait_for_job(job_id, "running")
    rig.batchrun("cancel", job_id)
    rig.wait_for_job(job_id, "cancelled")


def transfer_and_validate(rig: GatewayRig) -> None:
    """200 MiB and 50,000 lines up and down again, and validated several times."""
    content = b"".join(_lines())
    growth_bytes = _watch_memory(rig.pid_of("daemon"))
    with OpenAI(base_url=f"{rig.url}/v1", api_key="unused", timeout=CALL_LIMIT_S) as client:
        with rig.watched("upload") as figures:
            file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        assert file.bytes == FILE_BYTES, file
        figures |= {"bytes": FILE_BYTES, "daemon_growth_bytes": growth_bytes()}
        digest = hashlib.sha256()
        with (
            rig.watched("download") as figures,
            client.files.with_streaming_response.content(file.id) as reply,
        ):
            for piece in reply.iter_bytes():
                digest.update(piece)
        assert digest.digest() == hashlib.sha256(content).digest()
        figures |= {"bytes": FILE_BYTES, "daemon_growth_bytes": growth_bytes()}
        growths, times_s = [], []
        for _ in range(NUM_VALIDATIONS):
            with rig.watched("validate") as figures:
                began_s = time.monotonic()
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                ).id
                rig.wait_for_batch(client, batch, "in_progress")
                times_s.append(time.monotonic() - began_s)
            growths.append(growth_bytes())
            client.batches.cancel(batch)
            rig.wait_for_batch(client, batch, "cancelled")
    figures |= {"lines": FILE_LINES, "longest_s": max(times_s)}
    figures |= {"first_growth_bytes": growths[0], "last_growth_bytes": growths[-1]}


def export(rig: GatewayRig, job_id: str) -> None:
    """A million results, written by the daemon at the job's end and by `batchrun results` too."""
    rig.batchrun("resume", job_id)
    rig.wait_for_job(job_id, "finalizing", "completed")
    with (
        rig.watched("export") as figures,
        rig.popen("results", job_id, "-o", "copy.parquet") as copy,
    ):
        began_s = time.monotonic()
        rig.wait_for_job(job_id, "completed")
        daemon_s = time.monotonic() - began_s
        assert copy.wait() == 0
        figures |= {"daemon_s": daemon_s, "command_s": time.monotonic() - began_s}
    figures["rows"] = pq.read_metadata(rig.folder / "out.parquet").num_rows
    assert pq.read_metadata(rig.folder / "copy.parquet").num_rows == figures["rows"]


def measure_on_engine(folder: Path) -> Record:
    """What the gateway adds to the TTFT of a real vLLM with the tiny model, for the record.

    Calls in pairs, one at a time, through the gateway and directly; who goes first alternates.
    """
    deployment = Deployment(folder)
    port = deployment.engine_port
    args, env = ["--max-num-batched-tokens", "512"], {"VLLM_API_KEY": "direct"}
    deployment.configure({"port": port, "vllm_args": args, "env": env}, model="tiny")
    urls = (deployment.url, f"http://127.0.0.1:{port}")
    targets = [
        ReplayTarget(f"{url}/v1", "tiny", api_key="direct", extra_body={"ignore_eos": True})
        for url in urls
    ]
    pairs_ms = np.zeros((WARM_PAIRS + NUM_PAIRS, 2))
    with deployment.running():
        for index in range(len(pairs_ms)):
            call = CallArrival(0.0, f"Call number {index}: tell me something.", 16)
            for place in (0, 1) if index % 2 else (1, 0):
                (result,) = asyncio.run(replay([call], targets[place]))
                if result.error or result.ttft_s is None:
                    raise RuntimeError(f"call {index}: {result.error or 'no token came'}")
                pairs_ms[index, place] = 1e3 * result.ttft_s
    through_ms, direct_ms = pairs_ms[WARM_PAIRS:].T
    figures: dict[str, object] = {"phase": "real engine", "broken": 0}
    figures |= {"calls": NUM_PAIRS, "direct_calls": NUM_PAIRS}
    for name, values_ms in (("direct", direct_ms), ("added", through_ms - direct_ms)):
        for percent in (50, 99):
            figures[f"{name}_ttft_p{percent}_ms"] = float(np.percentile(values_ms, percent))
    return figures


def _watch_memory(pid: int) -> Callable[[], int]:
    """By how many bytes the process's resident memory has grown at most since this call."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = psutil.Process(pid).memory_info().rss

    def growth_bytes() -> int:
        (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(peak) * 1024 - before

    return growth_bytes


def _lines() -> Iterator[bytes]:
    """The file's lines: good ones, of the same length."""
    for index in range(FILE_LINES):
        messages = [{"role": "user", "content": f"question {index} ".ljust(LINE_BYTES - 300, "q")}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8}
        line = {"custom_id": f"row-{index}", "method": "POST", "url": CHAT, "body": body}
        yield json.dumps(line).encode().ljust(LINE_BYTES - 1) + b"\n"


if __name__ == "__main__":
    raise SystemExit(main())
