"""`late_calls: refuse`: a call that the engines cannot begin to answer in time is told so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_rig import Engine, Gateway, rig

from batchrun.routing.lateness import LEAST_PACES

CLASS = {"x-batchrun-class": "slow"}
BOUND_S, PROMPT_S = 60.0, 0.2
"""Of the class, and what the engine takes at least for each short prompt."""
SHORT_BYTES, LONG_BYTES = 40, 1_000
MOST_CALLS = 60
KNOWN: dict[str, Any] = {
    "slo_classes": {"slow": {"ttft_s": BOUND_S, "tpot_s": 1.0}},
    "hint_nonce": "s3cret-nonce_of-the-engine-0123456789",
}


def chat(number: int, num_bytes: int, **others: object) -> dict[str, object]:
    """A call with a prompt of its own."""
    content = f"{number:04} " + "x" * (num_bytes - 5)
    messages = [{"role": "user", "content": content}]
    return {"model": "gated", "stream": True, "messages": messages, **others}


async def one_by_one(engine: Engine, gateway: Gateway) -> None:
    """Calls that wait for each other, until the gateway knows how long they do."""
    async with AsyncExitStack() as exits:
        calls = [chat(i, SHORT_BYTES, n_chunks=1) for i in range(LEAST_PACES + 2)]
        replies = [
            await exits.enter_async_context(gateway.post(call, headers=CLASS)) for call in calls
        ]
        for reply in replies:
            await asyncio.sleep(PROMPT_S)
            engine.gate.release()
            assert b"[DONE]" in await reply.read()


async def held(gateway: Gateway, exits: AsyncExitStack) -> list[Any]:
    """Calls that the engine does not begin to answer, up to the first that is refused."""
    replies = []
    for number in range(MOST_CALLS):
        call = chat(100 + number, LONG_BYTES)
        replies.append(await exits.enter_async_context(gateway.post(call, headers=CLASS)))
        if replies[-1].status != 200:
            break
    return replies


async def test_a_call_that_would_be_late_is_a_429_that_says_when_to_come_back(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, late_calls="refuse", **KNOWN) as (engine, gateway):
        await one_by_one(engine, gateway)
        num_before = len(engine.seen)
        async with AsyncExitStack() as exits:
            *served, refused = await held(gateway, exits)

            assert refused.status == 429
            error = (await refused.json())["error"]
            assert (error["type"], error["code"], error["param"]) == (
                "requests",
                "overloaded",
                None,
            )
            retry_s = int(refused.headers["Retry-After"])
            assert f"try again in {retry_s}s" in error["message"]
            assert 1 <= retry_s <= BOUND_S
            assert len(engine.seen) == num_before + len(served)
            assert served, "the first finds nobody before it"

            call = chat(900, LONG_BYTES)
            flex = call | {"service_tier": "flex"}
            for body, headers in ((call, {}), (flex, CLASS)):
                reply = await exits.enter_async_context(gateway.post(body, headers=headers))
                assert reply.status == 200, "promised nothing that the gateway knows of"


@pytest.mark.parametrize("late_calls", ["serve", "of a later release"])
async def test_unless_the_deployment_says_so_no_call_is_refused(
    tmp_path: Path, late_calls: str
) -> None:
    async with rig(tmp_path, late_calls=late_calls, **KNOWN) as (engine, gateway):
        await one_by_one(engine, gateway)
        async with AsyncExitStack() as exits:
            replies = await held(gateway, exits)
            assert {reply.status for reply in replies} == {200}
            await engine.has_seen(LEAST_PACES + 2 + MOST_CALLS)
