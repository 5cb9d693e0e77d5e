"""Engines with what vLLM offers turned on, and checks that it works while offline rows run."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from combination_models import LORA_RANK, build_lora
from engine_builders import real_settings
from engine_calls import NONCE, NUM_ROWS, ROW_TOKENS, EngineCalls

from batchrun.engine.command import ManagedSettings
from batchrun.hints import HINT_NONCE_VARIABLE
from batchrun.vllm_waiting import NAPPING, WAIT_VARIABLE

ENV = {
    HINT_NONCE_VARIABLE: NONCE,
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # names the API servers
    WAIT_VARIABLE: NAPPING,  # as every CPU engine that batchrun starts by its model
}
SCHEDULER = {"policy": "echo", "slo": {"ttft_s": 5.0, "tpot_s": 1.0}}
ADAPTERS = ("first", "second", "third")
MAX_LORAS = 2
BLOCK_TOKENS = 32
BASE_ARGS = (
    "--kv-cache-memory-bytes=67108864",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    f"--block-size={BLOCK_TOKENS}",
)


def settings_of(folder: Path, model: Path, *vllm_args: str) -> ManagedSettings:
    """An engine with batchrun's scheduler."""
    plain = real_settings(folder, model)
    return replace(plain, vllm_args=(*BASE_ARGS, *vllm_args), env=ENV, scheduler=SCHEDULER)


def feature_args(folder: Path) -> tuple[str, ...]:
    """Arguments for adapters, made in `folder`, and for structured outputs without spaces."""
    adapters = [f"{name}={build_lora(folder / name, i)}" for i, name in enumerate(ADAPTERS)]
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}
    return (
        f"--structured-outputs-config={json.dumps(compact)}",
        "--enable-lora",
        f"--max-loras={MAX_LORAS}",
        f"--max-lora-rank={LORA_RANK}",
        "--lora-modules",
        *adapters,
    )


async def check_several_choices(engine: EngineCalls) -> None:
    """`n` > 1 of a call and of a row."""
    sampled = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12}
    async with engine.rows_beside():
        call, row = await asyncio.gather(
            engine.complete("many", **sampled), engine.row(9_000, **sampled)
        )
    for answer in (call, row):
        assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == 36
        assert len({choice["text"] for choice in answer["choices"]}) > 1


async def check_structured_outputs(engine: EngineCalls) -> None:
    """A JSON schema of a call, regular expressions of rows."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [7, 8, 9]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    row_form = {"structured_outputs": {"regex": "[ab]{40}"}, "max_tokens": 60, "ignore_eos": False}
    async with engine.rows_beside():
        chat, *rows = await asyncio.gather(
            engine.chat(response_format=form, max_tokens=40),
            *(engine.row(9_100 + number, **row_form) for number in range(3)),
        )
    content = chat["choices"][0]["message"]["content"]
    assert re.fullmatch(r'\{"n": ?[789]\}', content), content
    texts = [row["choices"][0]["text"] for row in rows]
    assert all(re.fullmatch("[ab]{40}", text) for text in texts), texts


async def check_callers_that_leave(engine: EngineCalls) -> None:
    """A call and a row whose callers leave while they are answered: nothing of them stays."""
    async with engine.rows_beside():
        call, row = (
            engine.stream("long", max_tokens=1_500),
            engine.stream_row(9_200, max_tokens=1_500),
        )
        async with aclosing(call), aclosing(row):
            assert await anext(call) and await anext(row)
    await check_nothing_is_left(engine)


async def check_nothing_is_left(engine: EngineCalls) -> None:
    """No request runs or waits."""
    assert await engine.gauge_of_at_most("vllm:num_requests_running", 0) == 0
    assert await engine.gauge_of_at_most("vllm:num_requests_waiting", 0) == 0


async def check_more_adapters_than_slots(engine: EngineCalls) -> None:
    """Calls and rows of more adapters than may run at once."""
    # Not the base model: vLLM's CPU kernels give its tokens an adapter when both are in a step.
    alone = {name: await engine.text("adapt", model=name) for name in ADAPTERS}
    assert len(set(alone.values())) == len(alone), alone
    rows = [
        asyncio.create_task(
            engine.row(9_400 + number, model=ADAPTERS[number % 3], max_tokens=ROW_TOKENS)
        )
        for number in range(NUM_ROWS)
    ]
    async with engine.rows_beside():
        beside = await asyncio.gather(*(engine.text("adapt", model=name) for name in alone))
    assert dict(zip(alone, beside, strict=True)) == alone
    assert {row["choices"][0]["finish_reason"] for row in await asyncio.gather(*rows)} == {"length"}
