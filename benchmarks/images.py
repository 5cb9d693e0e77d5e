"""Jobs with images on the real vLLM: all rows done, and hits as `inspect` predicts them.

    python -m benchmarks.images --annotations FOLDER [--rows N] [--json FILE]

FOLDER holds NExT-QA's `mc_val.csv`. The first rows, each with eight frames, run as a job with image
files, as one with addresses on a listed host, and as a batch of OpenAI's API with data URLs, each
time with other frames, on the tiny vision model. Then addresses that must be refused are tried, in
calls and in a batch.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import requests
from openai import OpenAI

from benchmarks.deployment import Deployment
from benchmarks.hostile_urls import HOSTILE_URLS, HOSTS
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.video_rows import ENDPOINT, MODEL, VideoRows, batch_line

FOLDER = Path("build/images")
POINTS = 3.0
"""Percentage points by which the hit rate may differ from what `inspect` predicts."""
VLLM_ARGS = ("--kv-cache-memory-bytes=67108864", "--max-model-len=8192", "--max-num-seqs=32")
POLL_S = 1.0


def main() -> int:
    """Measure, print, save."""
    made = parser(__doc__, rows=400)
    made.add_argument("--annotations", type=Path, required=True, metavar="FOLDER")
    options = made.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    deployment = Deployment(FOLDER)
    engine = {"port": deployment.engine_port, "vllm_args": VLLM_ARGS}
    with serving(FOLDER) as address:
        deployment.configure(engine, model=MODEL, image_hosts=[*HOSTS, address])
        with deployment.running() as gateway:
            records = shown(measure(deployment, (gateway, address), options))
    return finish(options.json, records, bars(records))


def measure(
    deployment: Deployment, addresses: tuple[str, str], options: Namespace
) -> Iterator[Record]:
    """A record of each way, and of the refusals. `addresses` are those of the gateway and of the
    host of images."""
    gateway, host = addresses
    files, web, data = (
        VideoRows(options.annotations, options.rows, seed=seed) for seed in range(3)
    )
    yield run_job(deployment, files, "files")
    yield run_job(deployment, web, "addresses", f"http://{host}/")
    yield run_batch(deployment, gateway, data)
    yield try_hostile_urls(gateway)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A web server of a folder that may be yet to come; its HOST:PORT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


def bars(records: list[Record]) -> Iterator[Bar]:
    """What must hold for each way, and for hostile addresses."""
    for record in records[:-1]:
        way, points = record["way"], 100 * abs(record["hit_rate"] - record["expected_hit_rate"])
        yield Bar(f"{way}: rows that are not done", record["rows"] - record["done"], 0, True)
        yield Bar(f"{way}: points between the hit rate and inspect's", points, POINTS, True)
    refusals = records[-1]
    for kind in ("calls", "rows"):
        missed = refusals["urls"] - refusals[f"refused_{kind}"]
        yield Bar(f"hostile addresses that {kind} were not refused for", missed, 0, True)


def run_job(deployment: Deployment, video_rows: VideoRows, name: str, base_url: str = "") -> Record:
    """The rows as a job, from `inspect` to the output."""
    job = video_rows.write(deployment.folder, name, base_url).name
    inspected = deployment.batchrun("inspect", job)
    start_s = time.monotonic()
    deployment.batchrun("submit", job, "--wait")
    answers = pq.read_table(deployment.folder / f"{name}-answers.parquet").to_pylist()
    usages = [(row["prompt_tokens"], row["cached_tokens"]) for row in answers if not row["error"]]
    return _record(f"job with {name}", inspected, usages, time.monotonic() - start_s)


def run_batch(deployment: Deployment, gateway: str, video_rows: VideoRows) -> Record:
    """The rows as a batch with data URLs, through OpenAI's client."""
    name = video_rows.write(deployment.folder, "inspected").name
    inspected = deployment.batchrun("inspect", name)
    start_s = time.monotonic()
    with OpenAI(base_url=f"{gateway}/v1", api_key="unused") as client:
        lines = _answers(client, video_rows.batch_lines())
    usages = []
    for line in lines:
        usage = line["response"]["body"].get("usage", {})
        if line["response"]["status_code"] == 200:
            usages.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return _record("batch with data URLs", inspected, usages, time.monotonic() - start_s)


def try_hostile_urls(gateway: str) -> Record:
    """Each address in a call of its own, and all of them in a batch."""
    contents = [[{"type": "image_url", "image_url": {"url": url}}] for url in HOSTILE_URLS]
    statuses = []
    for content in contents:
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        statuses.append(requests.post(gateway + ENDPOINT, json=body, timeout=60).status_code)
    with OpenAI(base_url=f"{gateway}/v1", api_key="unused") as client:
        rows = (batch_line(str(row), content, 1) for row, content in enumerate(contents))
        lines = _answers(client, b"".join(rows))
    refused = [line["error"] for line in lines if line["error"] is not None]
    return {
        "way": "hostile addresses",
        "urls": len(HOSTILE_URLS),
        "refused_calls": statuses.count(400),
        "refused_rows": sum(error["code"] == "invalid_image" for error in refused),
    }


def _answers(client: OpenAI, lines: bytes) -> list[dict[str, Any]]:
    """The lines of both result files of a batch, once it has ended."""
    file = client.files.create(file=("rows.jsonl", lines), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status not in {"completed", "failed", "expired", "cancelled"}:
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
    found = (file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id)
    texts = [client.files.content(file_id).text for file_id in found]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _record(
    way: str, inspected: dict[str, Any], usages: list[tuple[int, int]], duration_s: float
) -> dict[str, Any]:
    num_prompt_tokens = sum(prompt for prompt, _ in usages)
    return {
        "way": way,
        "rows": inspected["rows"],
        "done": len(usages),
        "prompt_tokens": num_prompt_tokens,
        "inspected_prompt_tokens": round(inspected["prompt_tokens_total"]),
        "hit_rate": sum(cached for _, cached in usages) / max(num_prompt_tokens, 1),
        "expected_hit_rate": inspected["expected_hit_rate"],
        "best_hit_rate": inspected["best_hit_rate"],
        "kv_tokens": inspected["kv_tokens"],
        "duration_s": round(duration_s, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
