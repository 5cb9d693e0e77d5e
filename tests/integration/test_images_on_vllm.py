"""Jobs, batches and calls with images, on the real vLLM with the tiny vision model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deployment_rig import DeploymentRig
from image_builders import data_url_of, image_body, picture
from openai import BadRequestError, OpenAI

from batchrun.jobs.prompts.image_tokens import ImageTokens

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

MODEL = "tiny-vision"
VLLM_ARGS = (
    "--kv-cache-memory-bytes=33554432",
    "--max-model-len=4096",
    "--max-num-seqs=8",
    "--block-size=32",
)
SIZE = (320, 240)
FRAMES = [picture(seed, SIZE) for seed in range(4)]
NUM_ROWS = 8
JOB_FILE = """\
name: frames
model: tiny-vision
input:
  path: frames.parquet
  messages:
    - role: user
      content:
        - image: {column: first}
        - image: {column: second}
        - {type: text, text: "What happens after {{ row }} s?"}
request: {max_tokens: 4, temperature: 0}
output: {path: out.parquet}
"""


@pytest.fixture(scope="module")
def web_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server of the frames, `0.png` and so on."""
    folder = tmp_path_factory.mktemp("web")
    for number, raw in enumerate(FRAMES):
        (folder / f"{number}.png").write_bytes(raw)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, web_port: int) -> Iterator[DeploymentRig]:
    """A deployment that serves the tiny vision model and may fetch from that server."""
    made = DeploymentRig(tmp_path_factory.mktemp("images"))
    engine = {"port": made.engine_port, "vllm_args": VLLM_ARGS}
    made.configure(engine, model=MODEL, image_hosts=[f"127.0.0.1:{web_port}"])
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture(scope="module")
def answers(rig: DeploymentRig) -> list[dict[str, Any]]:
    """The output of a job: two videos of two frames, a missing and two broken images."""
    for number, raw in enumerate(FRAMES):
        (rig.folder / f"{number}.png").write_bytes(raw)
    (rig.folder / "broken.png").write_bytes(b"no image")
    (rig.folder / "cut.png").write_bytes(FRAMES[0][:2_000])
    firsts = [f"{2 * (row % 2)}.png" for row in range(NUM_ROWS)]
    seconds = [f"{2 * (row % 2) + 1}.png" for row in range(NUM_ROWS)]
    seconds[-3:] = ["absent.png", "broken.png", "cut.png"]
    table = {"row": list(range(NUM_ROWS)), "first": firsts, "second": seconds}
    pq.write_table(pa.table(table), rig.folder / "frames.parquet")
    rig.write_job(JOB_FILE)
    assert rig.wait_until_ended(rig.ask("submit", "job.yaml")["id"])["state"] == "completed"
    return rig.output()


def test_rows_with_faulty_images_end_alone(answers: list[dict[str, Any]]) -> None:
    errors = [row["error"] and json.loads(row["error"]) for row in answers]
    assert errors[:-3] == [None] * (NUM_ROWS - 3)
    absent, broken, cut = errors[-3:]
    assert "'absent.png': no such file" in absent["message"]
    assert "'broken.png': the image is broken" in broken["message"]
    assert cut["status_code"] == 400 and "Failed to load image" in cut["message"]
    assert [absent["code"], broken["code"]] == ["invalid_image"] * 2


def test_the_engine_finds_the_images_of_other_rows_in_its_cache(
    rig: DeploymentRig, answers: list[dict[str, Any]]
) -> None:
    images = ImageTokens(rig.home / "models" / MODEL)
    shared = 2 * images.count(*SIZE)
    images.close()
    done = [row for row in answers if row["error"] is None]
    assert all(row["prompt_tokens"] > shared for row in done)
    cached = sorted(row["cached_tokens"] for row in done)
    assert cached[-3:] == [cached[-1]] * 3 and cached[-1] > shared - 32


def test_inspect_counts_what_the_engine_does(
    rig: DeploymentRig, answers: list[dict[str, Any]]
) -> None:
    figures = rig.ask("inspect", "job.yaml")
    done = [row["prompt_tokens"] for row in answers if row["error"] is None]
    assert figures["prompt_tokens_mean"] == pytest.approx(sum(done) / len(done), rel=0.02)
    assert figures["rows_with_template_errors"] == 2


@pytest.mark.usefixtures("answers")
def test_a_call_finds_what_a_job_has_computed(rig: DeploymentRig, web_port: int) -> None:
    ways = [
        [f"http://127.0.0.1:{web_port}/{number}.png" for number in (0, 1)],
        [data_url_of(raw) for raw in FRAMES[:2]],
    ]
    with rig.openai() as client:
        for way, urls in enumerate(ways):
            messages = image_body(*urls, text=f"way {way}")["messages"]
            reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
            assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
            cached = reply.usage.prompt_tokens_details.cached_tokens or 0
            assert cached > reply.usage.prompt_tokens / 2


def test_a_call_reaches_nothing_that_is_not_listed(rig: DeploymentRig) -> None:
    with rig.openai(max_retries=0) as client, socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        for url in (f"http://127.0.0.1:{trap.getsockname()[1]}/a.png", "file:///etc/passwd"):
            messages = image_body(url)["messages"]
            with pytest.raises(BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
            assert caught.value.code == "invalid_image"
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_an_engine_fetches_nothing_itself(rig: DeploymentRig, web_port: int) -> None:
    """Also for whoever asks it past the gateway."""
    engine = f"http://127.0.0.1:{rig.engine_port}/v1"
    key = (rig.home / "run" / "engine-0.key").read_text()
    with OpenAI(base_url=engine, api_key=key, max_retries=0) as client:
        messages = image_body(f"http://127.0.0.1:{web_port}/0.png")["messages"]
        with pytest.raises(BadRequestError, match="allowed domains"):
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)


def test_rows_of_a_batch_get_their_images(
    rig: DeploymentRig, web_port: int, tmp_path: Path
) -> None:
    urls = [f"http://127.0.0.1:{web_port}/0.png", data_url_of(FRAMES[0]), "http://127.0.0.1/a.png"]
    lines = [
        {"custom_id": url[:40], "method": "POST", "url": "/v1/chat/completions", "body": body}
        for url in urls
        for body in [image_body(url) | {"model": MODEL, "max_tokens": 2}]
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with rig.openai() as client:
        file = client.files.create(file=path, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert rig.wait_until_ended(batch.id)["state"] == "completed"
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None and batch.error_file_id is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        (error,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(error)["custom_id"] == urls[2]
    assert json.loads(error)["error"]["code"] == "invalid_image"
