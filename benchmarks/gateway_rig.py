"""A deployment whose engine streams at a fixed pace, with callers on it, for `gateway_cost`."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.deployment import Deployment, wait_until
from benchmarks.paced import CHAT

START_S, WAIT_S = 30.0, 600.0
NUM_PAIRS, WARM_PAIRS = 100, 5


@dataclass(slots=True)
class Window:
    """A phase that was measured: its spans of CLOCK_MONOTONIC seconds, and what the machine did.

    `cores` are processor seconds a second: of each process by its name, of the commands that the
    benchmark ran, and of all else on the machine.
    """

    name: str
    spans: list[tuple[float, float]] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    load_1min: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the phase ran."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def cores(self) -> dict[str, float]:
        """Processor seconds a second."""
        return {name: busy_s / self.seconds for name, busy_s in self.busy_s.items()}


class GatewayRig(Deployment):
    """`batchrun up` on an attached engine, with callers beside it, within `calling`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls_path = folder / "calls.npz"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Calls all the time, on the gateway and on the engine itself; offline work is off."""
        self.configure({"name": "paced", "attach": f"http://127.0.0.1:{self.engine_port}"})
        self._start("upstream", f"--serve={self.engine_port}")
        try:
            wait_until(self._serves, "the paced engine", START_S)
            with self.running():
                self.batchrun("offline", "off")
                ports = (f"--gateway={self.port}", f"--direct={self.engine_port}")
                self._start("client", *ports, f"--out={self.calls_path}")
                yield
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def stop_calling(self) -> None:
        """Let calls end; what became of all is in `calls_path` then."""
        client = self._processes["client"]
        client.send_signal(signal.SIGTERM)
        client.wait(timeout=WAIT_S)

    def wait_for_job(self, job_id: str, *states: str) -> None:
        """Until the job is in one of these states."""
        wait_until(lambda: self.job(job_id)["state"] in states, f"{job_id}: {states}", WAIT_S)

    @contextmanager
    def watched(self, window: Window) -> Iterator[None]:
        """Add the time of the block to `window`."""
        before, began_s = self._busy_s(), time.monotonic()
        yield
        window.spans.append((began_s, time.monotonic()))
        window.load_1min = os.getloadavg()[0]
        for name, busy_s in self._busy_s().items():
            window.busy_s[name] = window.busy_s.get(name, 0.0) + busy_s - before.get(name, 0.0)

    def _busy_s(self) -> dict[str, float]:
        """Processor seconds so far; `others` is all that is not ours."""
        pids = {name: process.pid for name, process in self._processes.items()}
        pids["daemon"] = self.daemon_pid
        pids["gateway"] = int(json.loads(self.home.gateway_process.read_text())["pid"])
        found = {}
        for name, pid in pids.items():
            times = psutil.Process(pid).cpu_times()
            found[name] = times.user + times.system
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["commands"] = ended.ru_utime + ended.ru_stime
        all_of = psutil.cpu_times()
        busy_s = sum(
            getattr(all_of, k) for k in ("user", "nice", "system", "irq", "softirq", "steal")
        )
        found["others"] = busy_s - time.process_time() - sum(found.values())
        return found

    def _serves(self) -> bool:
        try:
            return bool(_ttft_s(self.engine_port, "paced", "Are you there?", max_tokens=1))
        except OSError:
            return False

    def _start(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.paced", *arguments]
        # As engines and callers are: a session is what Linux shares processor time out among.
        self._processes[name] = subprocess.Popen(command, start_new_session=True)


def measure_on_engine(folder: Path) -> dict[str, object]:
    """What the gateway adds to the TTFT of a real vLLM with the tiny model, for the record.

    Calls in pairs, one at a time, through the gateway and directly; who goes first alternates.
    """
    deployment = Deployment(folder)
    engine = {"port": deployment.engine_port, "vllm_args": ["--max-num-batched-tokens", "512"]}
    deployment.configure(engine, model="tiny")
    ports = (deployment.port, deployment.engine_port)
    pairs_ms = np.zeros((WARM_PAIRS + NUM_PAIRS, 2))
    with deployment.running():
        for index in range(len(pairs_ms)):
            for place in (0, 1) if index % 2 else (1, 0):
                text = f"Call number {index}: tell me something."
                pairs_ms[index, place] = 1e3 * _ttft_s(ports[place], "tiny", text, max_tokens=16)
    through_ms, direct_ms = pairs_ms[WARM_PAIRS:].T
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


def _ttft_s(port: int, model: str, text: str, *, max_tokens: int) -> float:
    """Seconds from a connection's first byte to the first token. Raises RuntimeError."""
    document = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body, headers = json.dumps(document).encode(), {"Content-Type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        began_s = time.monotonic()
        connection.request("POST", CHAT, body, headers)
        reply = connection.getresponse()
        line = reply.readline()
        ttft_s = time.monotonic() - began_s
        rest = reply.read()
    if reply.status != 200 or not line.startswith(b"data: ") or b"[DONE]" not in rest:
        raise RuntimeError(f"no whole stream: {reply.status} {line!r} {rest[-200:]!r}")
    return ttft_s
