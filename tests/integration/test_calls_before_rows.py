"""A call that comes after a crowd of rows does not wait for the API server to read them all."""

from __future__ import annotations

import asyncio

import pytest
from engine_builders import CHAT, COMPLETION, REAL_MODEL, make_request
from engine_calls import EngineCalls

from batchrun.engine.command import ManagedSettings
from batchrun.engine.engine import ManagedEngine
from batchrun.types import OutcomeKind

pytestmark = pytest.mark.engine

NUM_ROWS = 100
TEXT = " ".join(f"river {number} stone" for number in range(1_000))
PROMPTS: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
    COMPLETION: {"prompt": [TEXT, "a second prompt"], "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
}


@pytest.mark.parametrize("endpoint", PROMPTS)
async def test_a_call_is_answered_before_the_rows_that_came_first(
    vllm_engine: ManagedSettings, endpoint: str
) -> None:
    client = ManagedEngine(vllm_engine).client
    body = {"model": REAL_MODEL, "priority": 100, **PROMPTS[endpoint]}
    calls = EngineCalls(vllm_engine.base_url)
    # An engine's first steps take seconds.
    await calls.complete(max_tokens=1)
    await client.execute(make_request(endpoint, body, row=NUM_ROWS))
    requests = [make_request(endpoint, body, row=row) for row in range(NUM_ROWS)]
    rows = [asyncio.create_task(client.execute(request)) for request in requests]
    await asyncio.wait(rows, return_when=asyncio.FIRST_COMPLETED)

    await calls.complete(max_tokens=1)
    num_answered = sum(row.done() for row in rows)

    outcomes = await asyncio.gather(*rows)
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.OK}
    assert num_answered < NUM_ROWS / 2
    await calls.close()
    await client.close()
