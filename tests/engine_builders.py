"""Builders for tests that need an engine: settings, scripts of faults, requests."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.types import Request
from benchmarks.deployment import free_port

FAKE_MODEL = "fake"
REAL_MODEL = "tiny"
REAL_ARGS = ("--kv-cache-memory-bytes=268435456", "--max-model-len=8192", "--max-num-seqs=32")
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def fake_settings(folder: Path, *options: str, **changes: object) -> ManagedSettings:
    """Settings of a managed engine whose command is the fake, with short pauses.

    `options` go to the fake's command line, `changes` to the settings.
    """
    port = free_port()
    fields: dict[str, object] = {
        "name": "fake",
        "model": FAKE_MODEL,
        "port": port,
        "run_dir": folder / "run",
        "log_dir": folder / "log",
        "command": (sys.executable, "-m", "batchrun.engine.fake", f"--port={port}", *options),
        "start_timeout_s": 60.0,
        "stop_grace_s": 5.0,
        "check_interval_s": 0.05,
        "backoff_first_s": 0.05,
    }
    return ManagedSettings(**{**fields, **changes})  # type: ignore[arg-type]


def with_program(settings: ManagedSettings, program: str) -> ManagedSettings:
    """The same engine, but its command is a few lines of Python."""
    return replace(settings, command=(sys.executable, "-c", program))


def real_settings(folder: Path, model: Path) -> ManagedSettings:
    """Settings of the real vLLM on the CPU, with little memory."""
    return ManagedSettings(
        name="vllm",
        model=str(model),
        served_model_name=REAL_MODEL,
        port=free_port(),
        run_dir=folder,
        log_dir=folder,
        vllm_args=REAL_ARGS,
        start_timeout_s=240.0,
    )


def script_option(folder: Path, *rules: dict[str, object]) -> str:
    """The fake's option for a script of these rules."""
    path = folder / "script.json"
    path.write_text(json.dumps(rules))
    return f"--script={path}"


def make_request(
    endpoint: str = CHAT,
    body: dict[str, object] | None = None,
    *,
    row: int = 3,
    attempt: int = 1,
) -> Request:
    """A request of job `job` in epoch 1; a chat of one word when no body is given."""
    chat = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hello"}]}
    return Request(
        job_id="job", row=row, attempt=attempt, epoch=1, endpoint=endpoint, body=body or chat
    )


def start_and_let_go(settings: ManagedSettings) -> None:
    """Start an engine from a test that has no event loop; it runs on when this returns."""

    async def start() -> None:
        engine = ManagedEngine(settings)
        try:
            await engine.start()
        finally:
            await engine.client.close()

    asyncio.run(start())


def stop(settings: ManagedSettings) -> None:
    """End an engine that `start_and_let_go` started."""
    asyncio.run(ManagedEngine(settings).stop())
