"""The programs of docs/api.md, run as they stand there, but for the address."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from deployment_rig import DeploymentRig
from openai_js import run_javascript

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS_CURL = pytest.mark.skipif(not shutil.which("curl"), reason="this machine has no curl")
MODEL = "tiny"
NUM_REQUESTS = 3


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentRig]:
    """One deployment whose engine serves the page's model."""
    made = DeploymentRig(tmp_path_factory.mktemp("page"))
    made.use_fake_engine(f"--model={MODEL}")
    made.ask("up", "-d")
    yield made
    made.close()


def program(language: str, number: int, rig: DeploymentRig) -> str:
    """A block of the page: the online calls are the first of their language, a batch the second."""
    found = [text for name, text in FENCE.findall(PAGE.read_text()) if name == language]
    text = str(found[number])
    assert "127.0.0.1:8000" in text
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{rig.port}")


def environment() -> dict[str, str]:
    """That of the tests, with the key that the page says to set."""
    return {**os.environ, "OPENAI_API_KEY": "sk-br-unused"}


def run_python(text: str, folder: Path) -> str:
    """What a program prints. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_shell(text: str, folder: Path) -> str:
    """What the lines print. They must succeed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def question(number: int) -> dict[str, Any]:
    """The body that the page's programs send."""
    messages = [{"role": "user", "content": f"Say {number} in words."}]
    return {"model": MODEL, "messages": messages, "max_tokens": 16}


def answer(rig: DeploymentRig, number: int = 7) -> str:
    """What the engine answers to it: the same to the same body."""
    url = f"http://127.0.0.1:{rig.port}/v1/chat/completions"
    reply = requests.post(url, json=question(number), timeout=60).json()
    return str(reply["choices"][0]["message"]["content"])


def write_requests(folder: Path) -> None:
    """`requests.jsonl`, as the page's Python makes it, but shorter."""
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        json.dumps({"custom_id": f"n-{number}", **line, "body": question(number)})
        for number in range(NUM_REQUESTS)
    ]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")


def answers_in(text: str) -> dict[str, str]:
    """The answers in the lines of a result file, by `custom_id`."""
    lines = [json.loads(line) for line in text.splitlines() if line]
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }


def right_answers(rig: DeploymentRig) -> dict[str, str]:
    """What must stand there."""
    return {f"n-{number}": answer(rig, number) for number in range(NUM_REQUESTS)}


def test_online_calls_from_python(deployment: DeploymentRig, tmp_path: Path) -> None:
    printed = run_python(program("python", 0, deployment), tmp_path)

    text = answer(deployment)
    assert text and printed == f"{text}\n{text}"


def test_a_batch_from_python(deployment: DeploymentRig, tmp_path: Path) -> None:
    printed = run_python(program("python", 1, deployment), tmp_path)

    assert "completed=100, failed=0" in printed
    assert printed.endswith(f"{answer(deployment)}\n")


@NEEDS_CURL
def test_online_calls_with_curl(deployment: DeploymentRig, tmp_path: Path) -> None:
    printed = run_shell(program("sh", 0, deployment), tmp_path)

    whole, *events = [line for line in re.split(r"\n|(?<=})(?=data: )", printed) if line]
    assert json.loads(whole)["choices"][0]["message"]["content"] == answer(deployment)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(pieces) == answer(deployment)
    assert events[-1] == "data: [DONE]"


@NEEDS_CURL
def test_a_batch_with_curl(deployment: DeploymentRig, tmp_path: Path) -> None:
    write_requests(tmp_path)

    printed = run_shell(program("sh", 1, deployment), tmp_path)

    assert answers_in(printed) == right_answers(deployment)


def test_online_calls_from_javascript(deployment: DeploymentRig, tmp_path: Path) -> None:
    printed = run_javascript(program("javascript", 0, deployment), tmp_path, environment())

    text = answer(deployment)
    assert text and printed == f"{text}\n{text}"


def test_a_batch_from_javascript(deployment: DeploymentRig, tmp_path: Path) -> None:
    write_requests(tmp_path)

    printed = run_javascript(program("javascript", 1, deployment), tmp_path, environment())

    assert answers_in(printed) == right_answers(deployment)
