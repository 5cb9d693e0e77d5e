"""Two virtual hours of one engine: calls, jobs, cancels, lost clients; the accounts balance."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from batchrun.cache.reuse import LEASE_S
from batchrun.hints import HINT_VERSION
from batchrun.simulator.virtual.engine import Arrival, VirtualEngine
from batchrun.simulator.virtual.setup import NONCE, A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

DURATION_S = 7_200.0
CHECK_EVERY_S = 5.0
BUSY_PERIOD_S, BUSY_S, BURST_S = 400.0, 40.0, 5.0
"""Each period begins with a burst of calls and goes on busily; most of it is quiet."""
EVENTS_PER_S = {
    "call": {"burst": 25.0, "busy": 4.0, "quiet": 0.1},
    "job": {"burst": 0.5, "busy": 0.2, "quiet": 0.005},
    "abort": {"burst": 1.0, "busy": 0.3, "quiet": 0.01},
    "cancel": {"burst": 0.0, "busy": 0.02, "quiet": 0.002},
    "restart": {"burst": 0.0, "busy": 0.004, "quiet": 0.0003},
}
MAX_EMPTY_STEPS_PER_S = 20
"""Those that follow another without a step between: while calls may come rows look once behind each
step in flight, and wait for its end. vLLM polls every millisecond: a spin is hundreds."""
MAX_STILL_S = 15.0
"""Requests wait or run, and nothing is computed for so long: a stall."""
MAX_ROW_S, MAX_FIRST_TOKEN_S = 60.0, 10.0
"""The smallest engine is given more than it can serve for seconds at a time."""


class Soak:
    """One engine, a daemon with jobs and users, all drawn from a seed."""

    def __init__(self, seed: int, num_blocks: int, settings: dict[str, Any]) -> None:
        self.rng = random.Random(seed)
        shape = EngineShape(
            num_blocks=num_blocks,
            token_budget=512,
            max_num_seqs=24,
            max_model_len=1_024,
            additional_config={"batchrun": settings},
        )
        self.engine = VirtualEngine(ColocatedScheduler, shape, A100Law())
        self.scheduler: Any = self.engine.scheduler
        self.counts: Counter[str] = Counter()
        self.jobs: dict[str, list[str]] = {}
        self.epoch = 1
        self._system = self._tokens(90)
        self._num_in_vain, self._was_empty = 0, False
        self._in_vain_before = (0, 0.0)
        self._moved = (0, 0.0)
        self._watch()

    def run(self) -> None:
        """Two hours, then until all is done."""
        engine, check_at_s = self.engine, 0.0
        next_at_s = {name: self._pause_s(name) for name in EVENTS_PER_S}
        while engine.now_s < DURATION_S:
            for name, at_s in next_at_s.items():
                if at_s <= engine.now_s:
                    self._maybe(name)
                    next_at_s[name] = engine.now_s + self._pause_s(name)
            if check_at_s <= engine.now_s:
                self.check()
                check_at_s = engine.now_s + CHECK_EVERY_S
            if not engine.step():
                engine.now_s = min(*next_at_s.values(), check_at_s, DURATION_S)
        engine.run_until(math.inf)

    def _pause_s(self, name: str) -> float:
        return self.rng.expovariate(max(EVENTS_PER_S[name].values()))

    def _maybe(self, name: str) -> None:
        """Thins the highest rate of this event out to that of the phase."""
        into_s = self.engine.now_s % BUSY_PERIOD_S
        phase = "burst" if into_s < BURST_S else "busy" if into_s < BUSY_S else "quiet"
        rates = EVENTS_PER_S[name]
        if self.rng.random() < rates[phase] / max(rates.values()):
            getattr(self, f"_{name}")()

    def _watch(self) -> None:
        schedule = self.scheduler.schedule

        def watched(*arguments: bool) -> SchedulerOutput:
            output: SchedulerOutput = schedule(*arguments)
            self._look_at_preempted(output)
            is_empty = output.total_num_scheduled_tokens == 0
            self._num_in_vain += is_empty and self._was_empty
            self._was_empty = is_empty
            return output

        self.scheduler.schedule = watched

    def _look_at_preempted(self, output: SchedulerOutput) -> None:
        preempted = output.preempted_req_ids or set()
        for name in preempted:
            self.counts["preempted calls" if name.startswith("call") else "preempted rows"] += 1
        if any(name.startswith("call") for name in preempted):
            running = [request.request_id for request in self.scheduler.running]
            assert all(name.startswith("call") for name in running), "a call made way for a row"

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randint(5, 2_000) for _ in range(num_tokens)]

    def _call(self) -> None:
        self.counts["calls"] += 1
        start = self._system if self.rng.random() < 0.5 else []
        prompt = start + self._tokens(min(500, int(self.rng.lognormvariate(4.5, 1.0)) + 1))
        num_tokens = min(120, int(self.rng.lognormvariate(3.5, 0.8)) + 1)
        self._add(f"call-{self.counts['calls']}", prompt, num_tokens, None)

    def _job(self) -> None:
        self.counts["jobs"] += 1
        job, rng = f"job-{self.counts['jobs']}", self.rng
        documents = [self._tokens(rng.randint(20, 700)) for _ in range(rng.randint(1, 5))]
        owners = sorted(rng.randrange(len(documents)) for _ in range(rng.randint(1, 40)))
        self.jobs[job] = []
        for row, document in enumerate(owners):
            later = [i for i in range(row + 1, len(owners)) if owners[i] == document]
            hint = {
                "v": HINT_VERSION, "nonce": NONCE, "epoch": self.epoch, "job": job, "row": row,
                "class": "offline", "rank": self.counts["rows"],
                "nodes": [[document, len(later), self.counts["rows"] + 1]],
            }  # fmt: skip
            self.counts["rows"] += 1
            prompt = documents[document] + self._tokens(rng.randint(3, 60))
            name = f"row-{job}-{row}"
            self.jobs[job].append(name)
            self._add(name, prompt, rng.randint(1, 64), json.dumps(hint))

    def _add(self, name: str, prompt: list[int], num_tokens: int, hint: str | None) -> None:
        self.engine.add(Arrival(name, hint is None, self.engine.now_s, prompt, num_tokens, hint))

    def _abort(self) -> None:
        """A client is lost."""
        if self.scheduler.requests:
            self.counts["aborts"] += 1
            self.engine.abort(self.rng.choice(list(self.scheduler.requests)))

    def _cancel(self) -> None:
        """A job is cancelled: the daemon drops the rows that it has sent."""
        if self.jobs:
            self.counts["cancels"] += 1
            for name in self.jobs.pop(self.rng.choice(list(self.jobs))):
                if name in self.scheduler.requests:
                    self.engine.abort(name)

    def _restart(self) -> None:
        """Another daemon: its rows are gone, its hints are of a new epoch."""
        self.counts["restarts"] += 1
        self.epoch += 1
        while self.jobs:
            self._cancel()

    def check(self) -> None:
        """Every block is free or held, every request waits or runs, and time was well spent."""
        scheduler = self.scheduler
        self._check_blocks()
        scheduler.state.queue.check()
        waiting = {request.request_id for request in scheduler.waiting}
        running = {request.request_id for request in scheduler.running}
        assert not waiting & running
        assert waiting | running == set(scheduler.requests) == set(scheduler.state.views)
        assert set(scheduler.view_builder.hits) <= set(scheduler.requests)
        self._check_progress()

    def _check_blocks(self) -> None:
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        holders: Counter[int] = Counter()
        for request in self.scheduler.running:
            for block_id in manager.get_block_ids(request.request_id)[0]:
                holders[block_id] += 1
        free = pool.free_block_queue.get_all_free_blocks()
        pool.free_block_queue.check()
        self.scheduler.state.kv._reuse.check()
        assert all(block.ref_cnt == holders[block.block_id] for block in pool.blocks[1:])
        free_ids = [block.block_id for block in free]
        assert sorted([*free_ids, *holders]) == list(range(1, pool.num_gpu_blocks))

    def _check_progress(self) -> None:
        totals, now_s = self.engine.totals, self.engine.now_s
        num_before, at_s = self._in_vain_before
        self._in_vain_before = (self._num_in_vain, now_s)
        span_s = max(1.0, now_s - at_s)
        assert self._num_in_vain - num_before <= MAX_EMPTY_STEPS_PER_S * span_s, "spins"
        tokens = totals.num_online_computed_tokens + totals.num_offline_computed_tokens
        if not self.scheduler.requests or tokens > self._moved[0]:
            self._moved = (tokens, now_s)
        assert now_s - self._moved[1] <= MAX_STILL_S, "stalls"

    def check_service(self) -> None:
        """Whoever was not aborted got everything, and within bounds."""
        records = self.engine.records.values()
        assert {record.finish_reason for record in records} == {"length", "abort"}
        for record in records:
            assert record.finished_at_s is not None
            if record.finish_reason == "abort":
                continue
            first_s = record.token_times_s[0] - record.arrival_at_s
            whole_s = record.finished_at_s - record.arrival_at_s
            assert first_s <= MAX_FIRST_TOKEN_S if record.is_online else whole_s <= MAX_ROW_S


KINDS = [
    (120, {"policy": "echo", "reserve": 0.2}),
    (400, {"policy": "echo"}),
    (1_600, {"policy": "echo", "eviction": "echo-rc"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("num_blocks", "settings"), KINDS)
def test_two_hours_leave_no_block_request_or_count_behind(
    num_blocks: int, settings: dict[str, Any]
) -> None:
    soak = Soak(num_blocks, num_blocks, settings)
    soak.run()

    soak.check()
    soak.check_service()
    scheduler: Any = soak.scheduler
    assert not scheduler.requests and not scheduler.state.views and not scheduler.view_builder.hits
    assert scheduler.state.num_policy_errors == scheduler.state.num_malformed_hints == 0
    assert soak.counts["preempted rows"] > 100
    scheduler.state.kv.expire(soak.engine.now_s + LEASE_S)
    assert not scheduler.state.kv._reuse.blocks
    assert scheduler.reset_prefix_cache()
