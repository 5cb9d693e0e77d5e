"""Two engines of different models: calls, batches and jobs go where theirs is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batch_rig import chat_line, jsonl
from deployment_rig import JOB_FILE, DeploymentRig
from openai import NotFoundError, OpenAI

from benchmarks.deployment import free_port

MODELS = ("small", "large")
WAIT_S = 60.0


def executions(rig: DeploymentRig, model: str) -> list[str]:
    """The request ids that the engine of a model has begun."""
    path = rig.folder / f"{model}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["request_id"] for line in lines]


def fake_engine(folder: Path, model: str) -> dict[str, object]:
    """One in batchrun.yaml."""
    port = free_port()
    options = [f"--port={port}", f"--model={model}", f"--executions={folder / model}.jsonl"]
    command = [sys.executable, "-m", "batchrun.engine.fake", *options]
    return {"name": model, "command": command, "port": port}


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until it is so."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.1)


@pytest.fixture
def client(rig: DeploymentRig) -> Iterator[OpenAI]:
    """OpenAI's, of a deployment with an engine for each model."""
    engines = [fake_engine(rig.folder, model) for model in MODELS]
    document = {"listen": f"127.0.0.1:{rig.port}", "engines": engines}
    (rig.folder / "batchrun.yaml").write_text(json.dumps(document))
    rig.ask("up", "-d")
    with rig.openai() as made:
        wait_until(lambda: len(made.models.list().data) == len(MODELS))
        yield made


def test_calls_batches_and_jobs_go_to_the_engine_of_their_model(
    rig: DeploymentRig, client: OpenAI
) -> None:
    assert [model.id for model in client.models.list()] == list(MODELS)
    assert client.models.retrieve("large").id == "large"

    for model in MODELS:
        for _ in range(4):
            said = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert said.model == model
    with pytest.raises(NotFoundError) as refused:
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.body == {
        "message": "The model `none` does not exist or you do not have access to it.",
        "type": "invalid_request_error",
        "param": None,
        "code": "model_not_found",
    }
    assert [len(executions(rig, model)) for model in MODELS] == [4, 4]

    lines = jsonl([chat_line(f"line-{i}", model="large") for i in range(6)])
    uploaded = client.files.create(file=("lines.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    assert [len(executions(rig, model)) for model in MODELS] == [4, 10]

    job = rig.submit_rows(*map(str, range(12)), job=JOB_FILE + "model: large\n")
    assert rig.wait_until_ended(job)["num_completed"] == 12
    other = JOB_FILE.replace("out.parquet", "other.parquet")
    job = rig.submit_rows(*map(str, range(20, 25)), job=other)
    assert rig.wait_until_ended(job)["num_completed"] == 5
    assert [len(executions(rig, model)) for model in MODELS] == [9, 22]

    rig.write_job(JOB_FILE + "model: huge\n")
    done = rig.call("submit", "job.yaml")
    code, line = done.returncode, done.stderr.splitlines()[-1]
    assert code == 2
    assert "no engine serves 'huge'; they serve large, small" in line
