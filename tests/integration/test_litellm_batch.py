"""LiteLLM's batch client, as its manual shows it, with another `api_base`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from batch_rig import chat_lines, jsonl
from deployment_rig import DeploymentRig
from download_cache import download_cache

VERSION = "1.106.2"
INSTALL_S = 280.0
PROGRAM = """
import json, sys, time
import litellm

path, base = sys.argv[1:]
where = {"custom_llm_provider": "openai", "api_base": base, "api_key": "a key"}
with open(path, "rb") as opened:
    file = litellm.create_file(file=opened, purpose="batch", **where)
batch = litellm.create_batch(
    completion_window="24h",
    endpoint="/v1/chat/completions",
    input_file_id=file.id,
    metadata={"key1": "value1"},
    **where,
)
while batch.status not in {"completed", "failed", "expired", "cancelled"}:
    time.sleep(0.1)
    batch = litellm.retrieve_batch(batch_id=batch.id, **where)
listed = litellm.list_batches(limit=2, **where)
content = litellm.file_content(file_id=batch.output_file_id, **where)
lines = [json.loads(line) for line in content.content.splitlines()]
deleted = litellm.file_delete(file_id=file.id, **where)
found = {
    "status": batch.status,
    "metadata": batch.metadata,
    "ids": sorted(line["custom_id"] for line in lines),
    "is_listed": batch.id in [each.id for each in listed.data],
    "is_deleted": deleted.deleted,
}
print(json.dumps(found))
"""


def python_with_litellm() -> Path:
    """The Python of an environment that holds LiteLLM. Made once, and kept.

    Skips the test when the registry that pip uses cannot be reached.
    """
    folder = download_cache() / "litellm" / VERSION
    if not folder.exists():
        try:
            _make_environment(folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"litellm {VERSION} cannot be installed: {error}")
    return folder / "bin" / "python"


def _make_environment(folder: Path) -> None:
    """Install it. The folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{VERSION}-", dir=folder.parent))
    python, options = unfinished / "bin" / "python", ["--quiet", "--disable-pip-version-check"]
    try:
        for command in (
            [sys.executable, "-m", "venv", str(unfinished)],
            [str(python), "-m", "pip", "install", *options, f"litellm=={VERSION}"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)
        if not folder.exists():
            unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_litellm_sees_a_batch_through(batch_rig: DeploymentRig, tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl(chat_lines(5)))

    done = subprocess.run(
        [
            str(python_with_litellm()),
            "-c",
            PROGRAM,
            str(path),
            f"http://127.0.0.1:{batch_rig.port}/v1",
        ],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert done.returncode == 0, done.stderr[-3_000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "status": "completed",
        "metadata": {"key1": "value1"},
        "ids": [f"question-{i}" for i in range(5)],
        "is_listed": True,
        "is_deleted": True,
    }
