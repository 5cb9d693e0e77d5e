"""The scheduler never corrupts anything, whatever happens: a worker looks at every KV slot.

Small KV, bursts of online calls, offline rows with hints, identical prompts, early stops, aborts,
prefix-cache resets, pauses and long silences, drawn from a seed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from shadow_engine import ShadowEngine
from shadow_worker import ShadowWorker, WorkerV1, WorkerV2, continuation
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from batchrun.cache.eviction import EVICTIONS
from batchrun.hints import HINT_KEY, HINT_VERSION
from batchrun.scheduling.policies import POLICIES, Policy
from batchrun.scheduling.view import EngineView, Plan
from batchrun.simulator.virtual.engine import OFFLINE_PRIORITY, ONLINE_PRIORITY, BlockHasher
from batchrun.simulator.virtual.setup import NONCE, EngineShape, build_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

BLOCK_TOKENS = 16
MAX_TURNS = 5_000
MAX_DRAIN_TURNS = 400
"""16 requests of at most 560 prompt and 90 output tokens, 64 tokens a step: 230 steps."""
MAX_IDLE_STEPS = 3
POLICY_NAMES = tuple(POLICIES)[::-1]
EVICTION_NAMES = tuple(EVICTIONS)[::-1]

# vLLM gives runner V1 at most two steps in flight.
RUNNERS = [(1, "V1"), (1, "V2"), (2, "V1"), (2, "V2"), (3, "V2")]
SEEDS = range(8)
MORE_SEEDS = range(30, 54)


@dataclass(slots=True, eq=False)
class Call:
    """A request to come, and what it must get."""

    name: str
    prompt: list[int]
    output: list[int]
    stop_token: int | None
    hint: str | None
    is_aborted: bool = False

    def request(self, arrival_at_s: float) -> Request:
        extra_args = None if self.hint is None else {HINT_KEY: self.hint}
        stop = None if self.stop_token is None else [self.stop_token]
        sampling = SamplingParams(
            # Where the output stops early, more would be allowed.
            max_tokens=len(self.output) + (0 if stop is None else 7),
            ignore_eos=True,
            stop_token_ids=stop,
            extra_args=extra_args,
        )
        return Request(
            request_id=self.name,
            prompt_token_ids=list(self.prompt),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=arrival_at_s,
            priority=ONLINE_PRIORITY if self.hint is None else OFFLINE_PRIORITY,
            block_hasher=BlockHasher(BLOCK_TOKENS, ()),
        )


@dataclass(slots=True, eq=False)
class Chaos:
    """Draws the calls and everything that happens to them."""

    rng: random.Random
    documents: list[list[int]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.documents = [self.tokens(self.rng.randint(40, 500)) for _ in range(5)]
        while len(self.calls) < 60:
            if self.calls and self.rng.random() < 0.1:
                self._add(self.rng.choice(self.calls).prompt)
            else:
                self._add(self._prompt())

    def tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randint(5, 2000) for _ in range(num_tokens)]

    def _prompt(self) -> list[int]:
        question = self.tokens(self.rng.randint(3, 60))
        if self.rng.random() < 0.4:
            return question + self.tokens(self.rng.choice([0, 0, 100, 300]))
        return self.rng.choice(self.documents)[: self.rng.randint(30, 500)] + question

    def _add(self, prompt: list[int]) -> None:
        rng, row = self.rng, len(self.calls)
        output = continuation(prompt, rng.choice([rng.randint(1, 30), rng.randint(1, 90)]))
        stop_token = output[-1] if rng.random() < 0.3 and output[-1] not in output[:-1] else None
        hint = None if rng.random() < 0.45 else self._hint(prompt, row)
        kind = "online" if hint is None else "row"
        self.calls.append(Call(f"{kind}-{row}", prompt, output, stop_token, hint))

    def _hint(self, prompt: list[int], row: int) -> str:
        rng = self.rng
        document = next((i for i, text in enumerate(self.documents) if text[:30] == prompt[:30]), 9)
        rank = row if rng.random() < 0.8 else rng.randint(0, 60)
        inner = [100 + document, rng.randint(0, 5), rank + rng.randint(1, 20)]
        outer = [1, rng.randint(0, 30), rank + 1]
        return json.dumps({
            "v": HINT_VERSION, "nonce": NONCE, "epoch": 1 + row // 40, "job": f"job-{row % 2}",
            "row": row, "class": "offline", "rank": rank,
            "nodes": rng.choice([[], [inner], [outer, inner]]),
        })  # fmt: skip


class ErraticPolicy:
    """Another policy's plans, with offline requests held back, cut short and thrown out at random.

    No shipped policy is so restless: what it may ask of the scheduler goes further than they do.
    """

    def __init__(self, inner: Policy, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng

    def plan(self, view: EngineView) -> Plan:
        """The inner plan, disturbed; it keeps its order, its budget and its slots."""
        rng, plan = self._rng, self._inner.plan(view)
        staying = [request for request in view.offline_running if request not in plan.preempt]
        thrown_out = [request for request in staying if rng.random() < 0.04]
        caps = dict(plan.caps)
        for request in staying:
            if rng.random() < 0.3:
                caps[request.request_id] = 0
            elif request.prefill_left_tokens > 1 and rng.random() < 0.3:
                given = caps.get(request.request_id, request.prefill_left_tokens)
                caps[request.request_id] = min(given, rng.randint(1, 40))
        return replace(plan, caps=caps, preempt=(*plan.preempt, *thrown_out))


class Trial:
    """One engine under chaos."""

    def __init__(self, seed: int, depth: int, runner: str) -> None:
        self.rng = random.Random(seed)
        self.policy = POLICY_NAMES[seed % len(POLICY_NAMES)]
        self.shape = self._draw_shape()
        self.scheduler = build_scheduler(ColocatedScheduler, self.shape, is_async=depth > 1)
        assert isinstance(self.scheduler, ColocatedScheduler)
        self.scheduler.use_v2_model_runner = runner == "V2"
        worker = self._worker(depth, runner)
        self.engine = ShadowEngine(self.scheduler, worker, depth)
        self.engine.before_update = self._maybe_abort
        self.scheduler.use_clock(lambda: self.engine.now_s)
        self.is_erratic = (
            seed // len(POLICY_NAMES) % 2 == 1 and self.scheduler.step_policy is not None
        )
        if self.scheduler.step_policy is not None and self.is_erratic:
            self.scheduler.step_policy = ErraticPolicy(self.scheduler.step_policy, self.rng)
        self.calls = {call.name: call for call in Chaos(self.rng).calls}
        self.to_come = list(self.calls.values())

    def _draw_shape(self) -> EngineShape:
        rng = self.rng
        settings: dict[str, Any] = {
            "policy": self.policy,
            "eviction": rng.choice(EVICTION_NAMES),
            "reserve": rng.choice(["forecast", 0.0, 0.3, 0.8]),
            "slo": {"ttft_s": rng.choice([0.05, 1.0]), "tpot_s": rng.choice([0.005, 0.05])},
        }
        return EngineShape(
            num_blocks=rng.choice([80, 80, 100, 140, 200]),
            token_budget=rng.choice([64, 128, 256]),
            max_num_seqs=rng.choice([4, 8, 16, 16]),
            block_tokens=BLOCK_TOKENS,
            max_model_len=1024,
            additional_config={"batchrun": settings},
        )

    def _worker(self, depth: int, runner: str) -> ShadowWorker:
        shape = self.shape
        size = (shape.num_blocks, BLOCK_TOKENS, shape.max_num_seqs)
        return WorkerV2(*size) if runner == "V2" else WorkerV1(*size, is_async=depth > 1)

    def run(self) -> None:
        """Send everything, let chaos reign, then let the rest finish in peace."""
        turns = 0
        while self.to_come:
            self._disturb()
            self._turn()
            turns += 1
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        while not self.engine.is_idle:
            self._turn()
            turns += 1
            assert turns < MAX_TURNS, f"stalled with {list(self.scheduler.requests)}"

    def _turn(self) -> None:
        self.engine.step()
        if self.scheduler.pause_state == PauseState.UNPAUSED and not self.is_erratic:
            assert self.engine.idle_steps <= MAX_IDLE_STEPS, "spins with work to do"
        else:
            self.engine.idle_steps = 0

    def _disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        for _ in range(rng.choices([0, 1, 8], [0.7, 0.27, 0.03])[0]):
            if self.to_come:
                call = self.to_come.pop()
                scheduler.add_request(call.request(self.engine.now_s))
        self._maybe_abort()
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.6)
        if rng.random() < 0.02:
            self._drain()
        elif rng.random() < 0.02:
            scheduler.set_pause_state(rng.choice(list(PauseState)))
        elif rng.random() < 0.2:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if rng.random() < 0.01:
            self.engine.now_s += rng.choice([0.5, 40.0, 100.0])

    def _drain(self) -> None:
        """As vLLM's pause that waits: who runs must end without anybody new being let in."""
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        turns = 0
        while not self.engine.is_idle:
            self._turn()
            turns += 1
            assert turns < MAX_DRAIN_TURNS, f"{len(self.scheduler.running)} requests never end"
        assert not self.scheduler.running

    def _maybe_abort(self) -> None:
        if self.to_come and self.rng.random() < 0.01 and self.scheduler.requests:
            name = self.rng.choice(list(self.scheduler.requests))
            self.calls[name].is_aborted = True
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def check_outputs(self) -> None:
        for call in self.calls.values():
            got = self.engine.outputs.get(call.name, [])
            if call.is_aborted:
                assert got == call.output[: len(got)], call.name
                assert call.name not in self.engine.reasons
            else:
                assert got == call.output, call.name
                reason = "length" if call.stop_token is None else "stop"
                assert self.engine.reasons[call.name] == reason

    def check_accounts(self) -> None:
        scheduler: Any = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
        free = pool.free_block_queue.get_all_free_blocks()
        assert sorted(block.block_id for block in free) == list(range(1, pool.num_gpu_blocks))
        assert not scheduler.requests and not scheduler.running
        assert len(scheduler.waiting) == 0 and not scheduler.deferred_waiting
        assert not scheduler._inflight_prefills
        assert not scheduler.state.views and not scheduler.view_builder.hits
        assert scheduler.state.num_policy_errors == 0 and scheduler.state.num_malformed_hints == 0
        scheduler.state.queue.check()
        assert scheduler.reset_prefix_cache()


def survive(seed: int, depth: int, runner: str) -> None:
    trial = Trial(seed, depth, runner)
    trial.run()
    trial.check_outputs()
    trial.check_accounts()


@pytest.mark.parametrize(("depth", "runner"), RUNNERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_gets_its_own_tokens_and_nothing_leaks(
    seed: int, depth: int, runner: str
) -> None:
    survive(seed, depth, runner)


@pytest.mark.nightly
@pytest.mark.parametrize(("depth", "runner"), RUNNERS)
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_every_request_gets_its_own_tokens_with_many_more_seeds(
    seed: int, depth: int, runner: str
) -> None:
    survive(seed, depth, runner)
