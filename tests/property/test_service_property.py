"""Small random workloads on the real scheduler: everyone is served, nothing is left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.cache.eviction import EVICTIONS
from batchrun.hints import HINT_VERSION
from batchrun.scheduling.policies import POLICIES
from batchrun.simulator.virtual.engine import Arrival, VirtualEngine
from batchrun.simulator.virtual.setup import NONCE, A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

MAX_TURNS = 20_000
MAX_MODEL_LEN = 640
"""40 blocks: as many as the smallest engine has."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A request to come: who it is, what it shares with others, how long it runs."""

    at_s: float
    is_online: bool
    document: int
    document_tokens: int
    own_tokens: int
    output_tokens: int


drawn = st.builds(
    Drawn,
    at_s=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    is_online=st.booleans(),
    document=st.integers(0, 2),
    document_tokens=st.sampled_from([0, 15, 160, 480]),
    own_tokens=st.integers(1, 100),
    output_tokens=st.integers(1, 60),
)
plug_in = st.fixed_dictionaries({
    "policy": st.sampled_from(list(POLICIES)),
    "eviction": st.sampled_from(list(EVICTIONS)),
    "reserve": st.sampled_from([0.0, 0.3, 0.9]),
    "slo": st.sampled_from([{"ttft_s": 1.0, "tpot_s": 0.05}, {"ttft_s": 0.05, "tpot_s": 0.005}]),
})


@st.composite
def shapes(draw: st.DrawFn) -> EngineShape:
    return EngineShape(
        num_blocks=draw(st.sampled_from([41, 60, 120])),
        token_budget=draw(st.sampled_from([32, 256])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=MAX_MODEL_LEN,
        additional_config={"batchrun": draw(plug_in)},
    )


def arrival(row: int, request: Drawn) -> Arrival:
    document = [5 + 40 * request.document + i % 37 for i in range(request.document_tokens)]
    prompt = document + [500 + (row * 7 + i) % 1_000 for i in range(request.own_tokens)]
    hint: dict[str, Any] = {
        "v": HINT_VERSION, "nonce": NONCE, "epoch": 1, "job": "job", "row": row,
        "class": "offline", "rank": row, "nodes": [[request.document, 1, row + 1]],
    }  # fmt: skip
    text = None if request.is_online else json.dumps(hint)
    name = f"{'call' if request.is_online else 'row'}-{row}"
    return Arrival(name, request.is_online, request.at_s, prompt, request.output_tokens, text)


@given(shapes(), st.lists(drawn, min_size=1, max_size=14))
@settings(max_examples=40, deadline=None)
def test_every_request_finishes_and_every_block_comes_back(
    shape: EngineShape, requests: list[Drawn]
) -> None:
    engine = VirtualEngine(ColocatedScheduler, shape, A100Law())
    to_come = sorted(enumerate(requests), key=lambda each: -each[1].at_s)
    num_turns = 0
    while to_come or engine.scheduler.has_requests():
        while to_come and to_come[-1][1].at_s <= engine.now_s:
            engine.add(arrival(*to_come.pop()))
        if not engine.step():
            engine.now_s = to_come[-1][1].at_s if to_come else engine.now_s
        num_turns += 1
        assert num_turns < MAX_TURNS, f"never ends: {list(engine.scheduler.requests)}"
    while engine.step():
        pass

    check_served(engine, requests)


def check_served(engine: VirtualEngine, requests: list[Drawn]) -> None:
    scheduler: Any = engine.scheduler
    assert len(engine.records) == len(requests)
    for record in engine.records.values():
        assert record.finish_reason == "length"
        wanted = requests[int(record.request_id.rpartition("-")[2])].output_tokens
        assert len(record.output_token_ids) == wanted
    pool = scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert sorted(free) == list(range(1, pool.num_gpu_blocks))
    assert not scheduler.requests and not scheduler.state.views and not scheduler.view_builder.hits
    assert scheduler.state.num_policy_errors == scheduler.state.num_malformed_hints == 0
    assert scheduler.reset_prefix_cache()
