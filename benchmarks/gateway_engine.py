"""What the gateway adds to the TTFT of a real vLLM: one row of `gateway_cost`, for the record."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.paced_upstream import CHAT
from benchmarks.ports import free_port

NUM_PAIRS = 100
WARM_PAIRS = 5
MAX_TOKENS = 16
MODEL = "tiny"


def measure_on_engine(folder: Path) -> dict[str, object]:
    """Calls in pairs, one at a time, through the gateway and directly; who goes first alternates.

    The engine is one that batchrun starts, with its tiny model.
    """
    port, engine_port = free_port(), free_port()
    document = {
        "model": "tiny",
        "listen": f"127.0.0.1:{port}",
        "engines": [{"port": engine_port, "vllm_args": ["--max-num-batched-tokens", "512"]}],
    }
    (folder / "batchrun.yaml").write_text(json.dumps(document))
    _batchrun(folder, "up", "-d")
    try:
        with (
            closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as through,
            closing(http.client.HTTPConnection("127.0.0.1", engine_port, timeout=60)) as direct,
        ):
            pairs = [_pair(through, direct, index) for index in range(WARM_PAIRS + NUM_PAIRS)]
    finally:
        _batchrun(folder, "down")
    through_ms, direct_ms = 1e3 * np.array(pairs[WARM_PAIRS:]).T
    return {
        "phase": "real engine",
        "calls": NUM_PAIRS,
        "direct_calls": NUM_PAIRS,
        "broken": 0,
        "direct_ttft_p50_ms": float(np.quantile(direct_ms, 0.5)),
        "direct_ttft_p99_ms": float(np.quantile(direct_ms, 0.99)),
        "added_ttft_p50_ms": float(np.quantile(through_ms - direct_ms, 0.5)),
        "added_ttft_p99_ms": float(np.quantile(through_ms - direct_ms, 0.99)),
    }


def _pair(
    through: http.client.HTTPConnection, direct: http.client.HTTPConnection, index: int
) -> tuple[float, float]:
    """Seconds to the first token: through the gateway, and directly."""
    text = f"Call number {index}: tell me something."
    if index % 2:
        first_s = _ttft_s(direct, text)
        return _ttft_s(through, text), first_s
    return _ttft_s(through, text), _ttft_s(direct, text)


def _ttft_s(connection: http.client.HTTPConnection, text: str) -> float:
    document = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    began_s = time.monotonic()
    body = json.dumps(document).encode()
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    line = reply.readline()
    ttft_s = time.monotonic() - began_s
    rest = reply.read()
    if reply.status != 200 or not line.startswith(b"data: ") or b"[DONE]" not in rest:
        raise RuntimeError(f"no whole stream: {reply.status} {line!r} {rest[-200:]!r}")
    return ttft_s


def _batchrun(folder: Path, *arguments: str) -> None:
    home = f"--home={folder / 'home'}"
    command = [sys.executable, "-m", "batchrun", *arguments, home]
    subprocess.run(command, cwd=folder, check=True)
