"""Engines spelled out, for tests that say what Echo makes of them.

The clock stands at 1,000 s, a block holds 10 tokens, and a token takes 0.1 ms: a hair less, so that
a limit in whole milliseconds holds whole tens of tokens. Nothing is wanted or reserved unless said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchrun.estimator.step_time import LinearModel
from batchrun.scheduling.policies import make_policy
from batchrun.scheduling.view import (
    BlockKind,
    BlockLaw,
    EngineView,
    Group,
    Plan,
    PrefixHit,
    RequestView,
)
from batchrun.types import RequestClass

NOW_S = 1_000.0
BLOCK_TOKENS = 10
TOKEN_S = 0.000_099_999_9


NO_HIT = PrefixHit()


@dataclass(frozen=True, slots=True)
class Kv:
    """What the KV cache has of a request: a hit while it waits, blocks of its own while it runs;
    `num_followers` will read what it reads."""

    hit: PrefixHit = NO_HIT
    private_blocks: int = 0
    num_followers: int = 0


def hit_of(request: RequestView) -> PrefixHit:
    """What a waiting request finds in the cache."""
    return _kv(request).hit


def held(num_tokens: int) -> PrefixHit:
    """A hit on blocks that running requests hold."""
    return PrefixHit(num_tokens, 0)


def idle(num_tokens: int) -> PrefixHit:
    """A hit on blocks that nobody holds: they are among the free ones."""
    return PrefixHit(num_tokens, num_tokens // BLOCK_TOKENS)


def call(name: str = "call", *, prompt: int = 99, output: int = 50, **fields: Any) -> RequestView:
    """A waiting online request: TTFT bound 1 s, TPOT bound 50 ms. It asks for 10 blocks."""
    bounds: dict[str, Any] = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.05, "arrival_at_s": NOW_S}
    bounds |= {"handle": Kv(), "has_class": "slo_ttft_s" in fields}
    return _request(name, RequestClass.ONLINE, prompt, output, bounds | fields)


def decoding_call(
    name: str = "call", *, generated: int = 5, due_in_s: float = 10.0, **fields: Any
) -> RequestView:
    """An online request that generates; its next token is due in so many seconds."""
    tpot_s = fields.get("slo_tpot_s", 0.05)
    first_at_s = NOW_S + due_in_s - generated * tpot_s
    seen = {"first_token_at_s": first_at_s, "arrival_at_s": first_at_s - 0.5}
    return _running(call(name, **seen | fields), generated, left=1)


def prefilling_call(name: str = "call", *, left: int, **fields: Any) -> RequestView:
    """An online request whose prompt lacks `left` tokens."""
    return _running(call(name, **fields), 0, left)


def row(
    name: str = "row",
    *,
    prompt: int = 90,
    output: int = 10,
    hit: PrefixHit = NO_HIT,
    document: str | None = None,
    num_followers: int = 0,
    **fields: Any,
) -> RequestView:
    """A waiting offline row. Without a hit it asks for 10 blocks."""
    kv = Kv(hit=hit, num_followers=num_followers)
    given = {"arrival_at_s": NOW_S, "is_row": True, "handle": kv}
    given["group"] = group_of(document)
    return _request(name, RequestClass.OFFLINE, prompt, output, given | fields)


def group_of(document: str | None) -> Group | None:
    """The prefix group of the rows that read a document, by its letter."""
    return None if document is None else ("job", ord(document))


def decoding_row(
    name: str = "row", *, generated: int = 5, private: int | None = None, **fields: Any
) -> RequestView:
    """An offline row that generates. It holds 10 blocks, all its own unless `private` says less."""
    return _running(row(name, **fields), generated, left=1, private=private)


def prefilling_row(name: str = "row", *, left: int, **fields: Any) -> RequestView:
    """An offline row whose prompt lacks `left` tokens."""
    return _running(row(name, **fields), 0, left)


def view(
    *,
    running: Sequence[RequestView] = (),
    waiting: Sequence[RequestView] = (),
    free_blocks: int = 1_000,
    wanted_blocks: int = 0,
    **fields: Any,
) -> EngineView:
    """An engine with these requests; `fields` sets other fields of the view."""
    given: dict[str, Any] = {
        "now_s": NOW_S,
        "rest_s": 0.0,
        "model": LinearModel(0.0, TOKEN_S, 0.0, 0.0, 0.0),
        "online_running": [r for r in running if not r.is_offline],
        "online_waiting": [r for r in waiting if not r.is_offline],
        "offline_running": [r for r in running if r.is_offline],
        "offline_waiting": [r for r in waiting if r.is_offline],
        "free_blocks": free_blocks,
        "total_blocks": free_blocks + _held_blocks(running) + 1,
        "reserve_blocks": 0,
        "online_blocks": _held_blocks([r for r in running if not r.is_offline]),
        "law": BlockLaw(BlockKind(BLOCK_TOKENS)),
        "token_budget": 10_000,
        "max_running": 100,
        "max_loras": 0,
        "look_up": hit_of,
        "wanted_blocks": lambda _: wanted_blocks,
        "num_followers": lambda r: _kv(r).num_followers,
        "private_blocks": lambda r: _kv(r).private_blocks,
        "is_ready": lambda _: True,
    }
    fields = given | fields
    return EngineView(**{"alone_model": fields["model"]} | fields)


def plan_of(engine: EngineView, policy_name: str = "echo") -> Plan:
    """What a policy that has seen no other step makes of it."""
    policy = make_policy(policy_name)
    assert policy is not None
    return policy.plan(engine)


def names(requests: Iterable[RequestView]) -> list[str]:
    """Their ids, in order."""
    return [request.request_id for request in requests]


def _request(
    name: str, request_class: RequestClass, prompt: int, output: int, fields: dict[str, Any]
) -> RequestView:
    given = {"max_output_tokens": output, "num_tokens": prompt} | fields
    return RequestView(name, request_class, num_prompt_tokens=prompt, **given)


def _running(
    request: RequestView, generated: int, left: int, private: int | None = None
) -> RequestView:
    request.num_output_tokens = generated
    request.num_tokens += generated
    request.work_left_tokens = left
    request.num_computed_tokens = request.num_tokens - left
    private_blocks = _blocks(request) if private is None else private
    request.handle = replace(_kv(request), private_blocks=private_blocks)
    return request


def _kv(request: RequestView) -> Kv:
    assert isinstance(request.handle, Kv)
    return request.handle


def _blocks(request: RequestView) -> int:
    return -(-request.num_computed_tokens // BLOCK_TOKENS)


def _held_blocks(running: Sequence[RequestView]) -> int:
    """Blocks of running requests, what the rows of a document share counted once."""
    shared: dict[Group | None, int] = {}
    for request in running:
        others = _blocks(request) - _kv(request).private_blocks
        shared[request.group] = max(others, shared.get(request.group, 0))
    return sum(shared.values()) + sum(_kv(request).private_blocks for request in running)
