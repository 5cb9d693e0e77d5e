"""Three machines, two real vLLM that Ray places, PostgreSQL, a leader and a standby with a gateway
each: parts are killed or stand still, links are cut, beside jobs and calls. Each row ends once."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from deployment_rig import JOB_FILE
from kill_rig import Outage, check_account, committed_at, job_state, wait_until
from machines_rig import (
    MODEL,
    MachineCluster,
    MachineFleet,
    MachineRig,
    Machines,
    can_make_machines,
)
from postgres_server import PostgresServer

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.engine,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not can_make_machines(), reason="makes network namespaces"),
]

VLLM_ARGS = (f"--kv-cache-memory-bytes={1 << 28}", "--max-model-len=4096", "--max-num-seqs=16")
ENDS_AN_ENGINE = ("actor", "agent", "engine", "raylet")
KILLED = (*ENDS_AN_ENGINE, "daemon", "gateway", "postgres")
LASTS_S = 20.0
"""So long a part stands still, and a link is down."""
JOB = JOB_FILE.replace(
    "max_tokens: 8, temperature: 0", "max_tokens: 192, temperature: 0, ignore_eos: true"
)
NUM_ROWS, LIVE_JOBS = 200, 2
LOG = logging.getLogger(__name__)
CALLS_PER_S, QUIET_S, CALL_WAIT_S = 2.0, 30.0, 60.0
BEFORE_S, AFTER_S = 3.0, 5.0
"""Calls that began so long before or after an event are not counted."""
LEAST_KEPT = 0.99
"""Of the calls that are counted, so many are answered as while nothing happens."""
TTFT_S = 1.0
"""How many calls had a first token within so long is told, not asserted."""


@dataclass(slots=True)
class Call:
    """A call of a caller's; `error` says what was wrong with its answer. UTC epoch seconds."""

    at: float
    first_at: float = 0.0
    error: str = "it never ended"


class Callers:
    """Callers behind a balancer, which asks the gateways each half second whether they answer, and
    tries the other where one refuses the connection."""

    def __init__(self, fleet: MachineFleet, rng: random.Random) -> None:
        self.calls: list[Call] = []
        self._fleet, self._rng = fleet, rng
        self._well = list(fleet.rigs)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._make, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Make no more calls; returns when the last has ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def kept(self, events: Sequence[Outage], since: float, until: float) -> float:
        """The share of the calls of a time, apart from those around events, that were answered."""
        counted = [
            call
            for call in self.calls
            if since <= call.at < until
            and not any(-BEFORE_S <= call.at - each.began_at <= AFTER_S for each in events)
        ]
        for call in counted:
            if call.error:
                LOG.info("%.1f s: %s", call.at - since, call.error)
        soon = sum(0 < call.first_at - call.at <= TTFT_S for call in counted) / len(counted)
        LOG.info("%d calls, %.4f of them within %g s", len(counted), soon, TTFT_S)
        return sum(not call.error for call in counted) / len(counted)

    def _watch(self) -> None:
        while not self._is_over.wait(0.5):
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(self._fleet.answers, self._fleet.rigs))
            self._well = [rig for rig, well in zip(self._fleet.rigs, answers, strict=True) if well]

    def _make(self) -> None:
        with ThreadPoolExecutor(64) as pool:
            while not self._is_over.wait(self._rng.expovariate(CALLS_PER_S)):
                self.calls.append(Call(time.time()))
                pool.submit(self._call, self.calls[-1], len(self.calls))

    def _call(self, call: Call, number: int) -> None:
        rigs = list(self._well) or list(self._fleet.rigs)
        random.Random(number).shuffle(rigs)
        for rig in rigs:
            try:
                call.error = self._ask(rig, call, number)
                return
            except requests.ConnectionError as error:
                call.error = f"{rig.url}: {error}"
            except requests.RequestException as error:
                call.error = f"{rig.url}: {error}"
                return

    def _ask(self, rig: MachineRig, call: Call, number: int) -> str:
        body: dict[str, Any] = {
            "model": MODEL,
            "stream": True,
            "max_tokens": 16,
            "ignore_eos": True,
        }
        text = f"Call {number}: what comes after {number * 7919 % 104729}?"
        body["messages"] = [{"role": "user", "content": text}]
        headers = {"Authorization": f"Bearer {self._fleet.key}"}
        url = f"{rig.url}/v1/chat/completions"
        waits = (1.0, CALL_WAIT_S)
        with requests.post(url, json=body, headers=headers, timeout=waits, stream=True) as reply:
            if not reply.ok:
                return f"{rig.url}: HTTP {reply.status_code} {reply.text[-200:]}"
            line = b""
            for each in filter(None, reply.iter_lines()):
                call.first_at, line = call.first_at or time.time(), each
        return "" if line == b"data: [DONE]" else f"{rig.url}: ended with {line[-200:]!r}"


class Jobs:
    """There are always two live jobs, submitted where a daemon leads."""

    def __init__(self, fleet: MachineFleet) -> None:
        self._fleet = fleet
        self.ids: list[tuple[MachineRig, str, str]] = []

    def more(self) -> None:
        """Submit what is missing."""
        live = sum(job_state(rig, job) == "running" for rig, job, _ in self.ids[-LIVE_JOBS:])
        for _ in range(LIVE_JOBS - live):
            rig, name = self._fleet.leader(), f"job-{len(self.ids)}"
            rig.write_rows([f"{name}, row {row}: what is next?" for row in range(NUM_ROWS)], name)
            text = JOB.replace("sample", name).replace("out.parquet", f"{name}.out.parquet")
            rig.write_job(text.replace("rows.parquet", name), f"{name}.yaml")
            self.ids.append((rig, str(rig.ask("submit", f"{name}.yaml")["id"]), name))

    def num_committed(self) -> int:
        """Of all jobs."""
        return sum(len(committed_at(rig, job)) for rig, job, _ in self.ids)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[MachineFleet]:
    machines = Machines(tmp_path)
    try:
        machines.start()
        postgres = PostgresServer(machines.here)
        cluster = MachineCluster(tmp_path / "ray", machines)
        try:
            cluster.start()
            made = MachineFleet(tmp_path, machines, cluster, postgres)
            try:
                made.start(VLLM_ARGS, window={"requests": 8})
                yield made
            finally:
                made.close()
        finally:
            cluster.close()
            postgres.close()
    finally:
        machines.close()


def happen(fleet: MachineFleet, what: str, part: str, rng: random.Random) -> None:
    """One event, to its end; what systemd would start again is started again."""
    if what == "cut":
        number = int(part)
        fleet.machines.cut(number)
        time.sleep(LASTS_S)
        fleet.machines.join(number)
        return
    processes, engines = fleet.part(part, rng), set(fleet.engines())
    assert processes, f"there is no {part}"
    number = signal.SIGSTOP if what == "stop" else signal.SIGKILL
    for process in processes[: 1 if what == "kill" else None]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    if what == "stop":
        time.sleep(LASTS_S)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    elif part == "postgres":
        psutil.wait_procs(processes, timeout=20)
        fleet.postgres.start()
    elif part in ENDS_AN_ENGINE:
        wait_until(lambda: not engines <= set(fleet.engines()))


def events(rng: random.Random, num_events: int) -> Iterator[tuple[str, str]]:
    """What happens: half are kills, and of the others as many parts stand still as links go."""
    for _ in range(num_events):
        what = rng.choice(("kill", "kill", "stop", "cut"))
        yield what, rng.choice(("1", "2", "3") if what == "cut" else KILLED)


@pytest.mark.parametrize(
    ("seed", "num_events"), [(0, 6), pytest.param(1, 40, marks=pytest.mark.nightly)]
)
def test_whatever_happens_to_a_cluster_each_row_ends_once(
    fleet: MachineFleet, seed: int, num_events: int
) -> None:
    rng, jobs, outages = random.Random(seed), Jobs(fleet), []
    callers = Callers(fleet, random.Random(seed + 1))
    try:
        jobs.more()
        began_at = time.time()
        time.sleep(QUIET_S)
        quiet_until = time.time()
        for what, part in events(rng, num_events):
            jobs.more()
            time.sleep(rng.uniform(0.0, 2.0))
            at, num_committed = time.time(), jobs.num_committed()
            happen(fleet, what, part, rng)
            fleet.wait_until_whole()
            outages.append(Outage(at, time.time(), num_committed))
            LOG.info("%s %s: %.1f s", what, part, time.time() - at)
            assert len(fleet.engines()) == 2
    finally:
        callers.stop()
    ended_at = time.time()

    for rig, job, name in jobs.ids:
        check_account(rig, job, outages, f"{name}.out.parquet")
    quiet, kept = (
        callers.kept([], began_at, quiet_until),
        callers.kept(outages, quiet_until, ended_at),
    )
    LOG.info("%d calls: %.4f in quiet, %.4f else", len(callers.calls), quiet, kept)
    assert kept >= LEAST_KEPT * quiet
    fleet.down()
    assert fleet.engines() == []
