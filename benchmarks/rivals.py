"""batchrun's gateway and the routers of others in turn: the same calls, before the same engines.

    python -m benchmarks.rivals [--workload NAME ...] [--rival NAME ...] [--rounds N] [--saturate]
                                [--judged-s S] [--env FOLDER] [--json FILE]

Four light engines over HTTP (`benchmarks.rival_engines`) in one process, slowed so that every token
of every call can pass two cores; arrivals are stretched alike. Routers get their defaults and the
engines' addresses; no router knows the length of an answer. Within a round all have the same calls,
begin with empty caches, and change places from round to round. The rivals come from the package
index into an environment of their own, FOLDER (`locks/rivals.txt`). `--saturate` counts the calls/s
that pass while 64 callers call again and again and engines answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import aiohttp
import numpy as np
import psutil
import requests

from batchrun.simulator.replay import CallArrival, OnlineResult, ReplayTarget, percentile, replay
from benchmarks.deployment import Deployment, answers, free_port, wait_until
from benchmarks.light_engines import UNIT_TOKENS, LightCall
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.rival_engines import LENGTH_CHARS, MODEL, TOKEN_CHARS, UNIT_CHARS
from benchmarks.routed_calls import WORKLOADS

NUM_ENGINES = 4
WARM_S = 15.0
DRAIN_S = 60.0
SATURATED_S, NUM_CALLERS = 15.0, 64
AT_ONCE = 1e4
MAX_ANSWER_TOKENS = 4_096
LOCK = Path(__file__).parents[1] / "locks/rivals.txt"
SPEEDS = {"toolbench": 0.2, "loogle": 1.0, "nextqa": 1.0, "sharegpt": 0.1}
"""Of the engines, as parts of the virtual A100's: what a workload's tokens leave of two cores."""
OURS = "batchrun"
SHARING = frozenset(SPEEDS) - {"sharegpt"}
VLLM_ROUTER, SMG, DYNAMO = "vllm-router", "smg", "dynamo"
RIVALS = {
    OURS: (),
    "vllm-router cache_aware": (VLLM_ROUTER, "cache_aware"),
    "vllm-router power_of_two": (VLLM_ROUTER, "power_of_two"),
    "vllm-router round_robin": (VLLM_ROUTER, "round_robin"),
    "smg cache_aware": (SMG, "cache_aware"),
    "dynamo kv": (DYNAMO, ""),
}
PACKAGES = {VLLM_ROUTER: "vllm-router", SMG: "smg", DYNAMO: "ai-dynamo-runtime"}


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the engines listen, and where they tell their KV events."""

    ports: Sequence[int]
    events: Sequence[int]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def hit_rate(self) -> float:
        """Cached tokens over prompt tokens of all calls."""
        found = [requests.get(f"{url}/stats", timeout=10).json() for url in self.urls]
        cached, prompt = (
            sum(int(each[name]) for each in found) for name in ("cached_tokens", "prompt_tokens")
        )
        return cached / max(prompt, 1)


@dataclass(frozen=True, slots=True)
class Running:
    """A router that runs: its address, and the processes that are its cost."""

    url: str
    pids: Sequence[int]

    def cpu_s(self) -> float:
        """CPU seconds of these processes and their children so far."""
        total_s = 0.0
        for pid in self.pids:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    total_s += times.user + times.system
        return total_s


def main() -> int:
    """Run round after round, print and save. 1 where a bar is missed."""
    options = _parser().parse_args()
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="rivals-") as scratch:
        trial = Trial(Path(scratch), options.env.resolve(), options.judged_s)
        trial.install(options.rival)
        measure = trial.saturated if options.saturate else trial.measured
        names = ["sharegpt"] if options.saturate else options.workload
        for number in range(options.rounds):
            shift = number % len(options.rival)
            order = [*options.rival[shift:], *options.rival[:shift]]
            for workload in names:
                found = (measure(rival, workload, number) for rival in order)
                records += shown(found)
    return finish(options.json, records, [] if options.saturate else bars(records))


class Trial:
    """One router at a time before fresh engines. `env` is the rivals' environment."""

    def __init__(self, scratch: Path, env: Path, judged_s: float) -> None:
        self._scratch, self._env, self._judged_s = scratch, env, judged_s

    def install(self, rivals: Sequence[str]) -> None:
        """Make the rivals' environment, unless it is there or nobody needs it."""
        python = self._env / "bin/python"
        if set(rivals) == {OURS} or python.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", str(self._env)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(LOCK)]
        subprocess.run(pip, check=True)

    def measured(self, rival: str, workload: str, seed: int) -> Record:
        """A flat record of one router on one draw of a workload; its error where it fails."""
        speed, known = SPEEDS[workload], WORKLOADS[workload]
        span_s = WARM_S + self._judged_s
        drawn = known.draw(np.random.default_rng(seed), known.rate_per_s, span_s * speed)
        arrivals = [arrival_of(call, speed, at) for at, call in enumerate(drawn)]
        which: Record = {
            "rival": self._name(rival),
            "workload": workload,
            "seed": seed,
            "rate_per_s": known.rate_per_s * speed,
            "speed": speed,
        }
        try:
            with self._running(rival, speed) as (engines, router):
                before_s = router.cpu_s()
                target = ReplayTarget(f"{router.url}/v1", MODEL, timeout_s=span_s + DRAIN_S)
                results = asyncio.run(replay(arrivals, target))
                cpu_s = router.cpu_s() - before_s
                found = figures(results, cpu_s)
                return {**which, **found, "prefix_hit_rate": engines.hit_rate()}
        except (OSError, TimeoutError, RuntimeError) as error:
            return {**which, "error": str(error)}

    def saturated(self, rival: str, workload: str, seed: int) -> Record:
        """How many calls a second pass, while engines answer at once."""
        drawn = WORKLOADS[workload].draw(np.random.default_rng(seed), 500.0, 4.0)
        arrivals = [arrival_of(call, 1.0, at, num_output=4) for at, call in enumerate(drawn)]
        name = self._name(rival)
        with self._running(rival, AT_ONCE) as (_, router):
            before_s = router.cpu_s()
            num_calls = asyncio.run(_call_without_end(router.url, arrivals))
            cpu_us = 1e6 * (router.cpu_s() - before_s) / max(1, num_calls)
        return {
            "rival": name,
            "seed": seed,
            "callers": NUM_CALLERS,
            "calls_per_s": num_calls / SATURATED_S,
            "cpu_us_per_call": cpu_us,
        }

    @contextmanager
    def _running(self, rival: str, speed: float) -> Iterator[tuple[Engines, Running]]:
        ports = [free_port() for _ in range(2 * NUM_ENGINES)]
        engines = Engines(ports[:NUM_ENGINES], ports[NUM_ENGINES:])
        command = [sys.executable, "-m", "benchmarks.rival_engines", f"--speed={speed}"]
        command += ["--ports", *map(str, engines.ports)]
        if DYNAMO in RIVALS[rival]:
            command += ["--events", *map(str, engines.events)]
        with ExitStack() as exits:
            self._start(exits, command)
            for url in engines.urls:
                wait_until(partial(answers, f"{url}/health"), "the engines", poll_s=0.2)
            router = exits.enter_context(self._router(rival, engines))
            time.sleep(2.0)
            yield engines, router

    @contextmanager
    def _router(self, rival: str, engines: Engines) -> Iterator[Running]:
        if rival == OURS:
            with self._gateway(engines) as running:
                yield running
            return
        with ExitStack() as exits:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            process = self._start(exits, self._command(rival, engines, port))
            wait_until(lambda: _serves(url, process), f"{rival} to serve", 120.0, 0.2)
            yield Running(url, [process.pid])

    @contextmanager
    def _gateway(self, engines: Engines) -> Iterator[Running]:
        deployment = Deployment(Path(tempfile.mkdtemp(dir=self._scratch)))
        attached = [
            {"name": str(number), "attach": url, "priority": True}
            for number, url in enumerate(engines.urls)
        ]
        deployment.configure({}, engines=attached, model=MODEL)
        with deployment.running() as url:
            wait_until(lambda: MODEL in requests.get(f"{url}/v1/models", timeout=5).text, "models")
            yield Running(url, [deployment.pid_of("gateway"), deployment.pid_of("daemon")])

    def _command(self, rival: str, engines: Engines, port: int) -> list[str]:
        package, policy = RIVALS[rival]
        if package == DYNAMO:
            proxy = str(Path(__file__).with_name("rival_dynamo.py"))
            command = [str(self._env / "bin/python"), proxy, f"--port={port}", "--engines"]
            return [*command, *map(str, engines.ports), "--events", *map(str, engines.events)]
        program = str(self._env / "bin" / package)
        command = [program, *(["launch"] if package == SMG else []), "--host=127.0.0.1"]
        command += [f"--port={port}", f"--policy={policy}", f"--prometheus-port={free_port()}"]
        return [*command, "--worker-urls", *engines.urls]

    def _start(self, exits: ExitStack, command: Sequence[str]) -> subprocess.Popen[bytes]:
        log = exits.enter_context((self._scratch / "programs.log").open("ab"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        exits.callback(process.wait)
        exits.callback(process.terminate)
        return process

    def _name(self, rival: str) -> str:
        """With the version that runs."""
        if rival == OURS:
            return f"{OURS} {version('batchrun')}"
        package, policy = RIVALS[rival]
        python = [str(self._env / "bin/python"), "-c"]
        ask = f"from importlib.metadata import version; print(version('{PACKAGES[package]}'))"
        found = subprocess.run([*python, ask], check=True, capture_output=True, text=True)
        return f"{package} {found.stdout.strip()} {policy}".strip()


def arrival_of(
    call: LightCall, speed: float, number: int, num_output: int | None = None
) -> CallArrival:
    """A call as text: equal units are equal text, and the end is the answer's length."""
    units = "".join(f"{key:016x}" * (UNIT_CHARS // 16) for key in call.units.tolist())
    rest = max(call.prompt_tokens - len(call.units) * UNIT_TOKENS, 4) * TOKEN_CHARS
    own = f"{number:08x}".rjust(rest - LENGTH_CHARS, "q")[: rest - LENGTH_CHARS]
    length = f"{num_output or call.output_tokens:0{LENGTH_CHARS}d}"
    return CallArrival(call.arrival_at_s / speed, f"{units}{own}{length}", MAX_ANSWER_TOKENS)


def figures(results: Sequence[OnlineResult], cpu_s: float) -> Record:
    """Of the calls that came after the warm-up; one without a first token took all of its time."""
    judged = [each for each in results if each.arrived_at_s >= WARM_S]
    ttft_s = [each.e2e_s if each.ttft_s is None else each.ttft_s for each in judged]
    return {
        "calls": len(judged),
        "failed": sum(each.error is not None for each in judged),
        "mean_ttft_s": fmean(ttft_s),
        "p50_ttft_s": percentile(ttft_s, 0.5),
        "p99_ttft_s": percentile(ttft_s, 0.99),
        "mean_s": fmean(each.e2e_s for each in judged),
        "cpu_us_per_call": 1e6 * cpu_s / max(1, len(results)),
    }


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """Ours ahead of each in mean TTFT where prefixes are shared, and hardly behind elsewhere."""

    def mean(rival: str, workload: str) -> float:
        of_it = [each for each in records if (each["rival"], each["workload"]) == (rival, workload)]
        return fmean(each.get("mean_ttft_s", float("nan")) for each in of_it)

    rivals = dict.fromkeys(record["rival"] for record in records)
    ours = next((rival for rival in rivals if rival.startswith(OURS)), None)
    for workload in dict.fromkeys(record["workload"] for record in records):
        for rival in rivals:
            if ours is None or rival == ours:
                continue
            ratio = mean(ours, workload) / mean(rival, workload)
            bound = 1.0 if workload in SHARING else 1.05
            yield Bar(f"{workload}: mean TTFT over that of {rival}", ratio, bound, is_most=True)


def _serves(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the router lists the model. Raises RuntimeError once it has ended."""
    if process.poll() is not None:
        raise RuntimeError(f"the router ended with exit code {process.returncode}")
    with suppress(requests.RequestException):
        return MODEL in requests.get(f"{url}/v1/models", timeout=5).text
    return False


async def _call_without_end(url: str, arrivals: Sequence[CallArrival]) -> int:
    """How many calls were answered whole in `SATURATED_S`."""
    end_s = time.monotonic() + SATURATED_S
    bodies = [
        {"model": MODEL, "messages": [{"role": "user", "content": each.prompt}], "stream": True}
        for each in arrivals
    ]
    num_calls = 0

    async def caller(session: aiohttp.ClientSession, first: int) -> None:
        nonlocal num_calls
        number = first
        while time.monotonic() < end_s:
            body = bodies[number % len(bodies)]
            number += NUM_CALLERS
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                num_calls += (await reply.read()).rstrip().endswith(b"[DONE]")

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(caller(session, number) for number in range(NUM_CALLERS)))
    return num_calls


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, rounds=1, judged_s=45.0, saturate=False)
    made.add_argument("--workload", choices=SPEEDS, nargs="+", default=list(SPEEDS))
    made.add_argument("--rival", choices=RIVALS, nargs="+", default=list(RIVALS))
    made.add_argument("--env", type=Path, default=Path("build/rivals"), metavar="FOLDER")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
