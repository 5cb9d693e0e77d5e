"""What vLLM offers works with batchrun's scheduler: a real request each, offline rows beside it.

`docs/combinations.md` names these tests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from combination_models import build_hybrid
from combination_rig import (
    BLOCK_TOKENS,
    ENV,
    check_callers_that_leave,
    check_more_adapters_than_slots,
    check_several_choices,
    check_structured_outputs,
    feature_args,
    settings_of,
)
from engine_builders import start_and_let_go, stop
from engine_calls import DOCUMENT, EngineCalls

from batchrun.engine.command import ManagedSettings, build_argv, find_vllm
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import EngineError

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

SERVE = Path(__file__).parents[1] / "vllm_serve.py"


def with_serve(settings: ManagedSettings) -> ManagedSettings:
    """The same engine, started by vLLM's `serve`."""
    build = find_vllm(settings.python)
    assert build is not None
    python, dash_m, _, *arguments = build_argv(settings, build, ENV)
    assert dash_m == "-m"
    return replace(settings, command=(python, str(SERVE), *arguments))


@pytest.fixture(scope="module")
def combined(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedSettings]:
    """One engine with everything that is turned on at the start: adapters, two API servers."""
    folder = tmp_path_factory.mktemp("combined")
    settings = settings_of(
        folder, tiny_model, "--api-server-count=2", "--max-logprobs=20", *feature_args(folder)
    )
    settings = with_serve(settings)
    start_and_let_go(settings)
    yield settings
    stop(settings)


@pytest.fixture(scope="module")
def hybrid_settings(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedSettings]:
    """One engine with a model of two kinds of attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = build_hybrid(folder / "model", tiny_model)
    settings = settings_of(folder, model, "--load-format=dummy")
    start_and_let_go(settings)
    yield settings
    stop(settings)


@pytest_asyncio.fixture
async def engine(combined: ManagedSettings) -> AsyncIterator[EngineCalls]:
    calls = EngineCalls(combined.base_url)
    yield calls
    await calls.close()


@pytest_asyncio.fixture
async def hybrid(hybrid_settings: ManagedSettings) -> AsyncIterator[EngineCalls]:
    calls = EngineCalls(hybrid_settings.base_url)
    yield calls
    await calls.close()


async def test_a_call_beside_rows_says_what_it_says_alone(engine: EngineCalls) -> None:
    alone = await engine.text("what is it", max_tokens=24)
    async with engine.rows_beside():
        assert await engine.text("what is it", max_tokens=24) == alone


async def test_streaming(engine: EngineCalls) -> None:
    alone = await engine.text("tell me", max_tokens=20)
    async with engine.rows_beside():
        parts = [part async for part in engine.stream("tell me", max_tokens=20)]
    assert len(parts) > 5
    assert "".join(part["choices"][0]["text"] for part in parts) == alone


async def test_logprobs(engine: EngineCalls) -> None:
    alone = (await engine.complete("one two", logprobs=3, max_tokens=8))["choices"][0]["logprobs"]
    async with engine.rows_beside():
        answer = await engine.complete("one two", logprobs=3, max_tokens=8)
    beside = answer["choices"][0]["logprobs"]
    assert beside["tokens"] == alone["tokens"] and len(beside["top_logprobs"]) == 8
    assert beside["token_logprobs"] == pytest.approx(alone["token_logprobs"], abs=1e-4)


async def test_several_choices_of_a_call_and_of_a_row(engine: EngineCalls) -> None:
    await check_several_choices(engine)


async def test_structured_outputs_of_a_call_and_of_rows(engine: EngineCalls) -> None:
    await check_structured_outputs(engine)


async def test_a_call_and_a_row_whose_callers_leave(engine: EngineCalls) -> None:
    await check_callers_that_leave(engine)


async def test_a_prefix_cache_reset_forgets_and_harms_nobody(engine: EngineCalls) -> None:
    async def cached() -> int:
        usage = (await engine.complete(DOCUMENT, max_tokens=1))["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    await cached()
    assert await cached() >= BLOCK_TOKENS
    await engine.order("/reset_prefix_cache")
    assert await cached() == 0
    alone = [await engine.row(9_300 + number) for number in range(3)]
    async with engine.rows_beside():
        tasks = [asyncio.create_task(engine.row(9_300 + number)) for number in range(3)]
        await asyncio.sleep(0.2)
        await engine.order("/reset_prefix_cache?reset_running_requests=true")
        beside = await asyncio.gather(*tasks)
    assert [row["choices"][0]["text"] for row in beside] == [
        row["choices"][0]["text"] for row in alone
    ]


@pytest.mark.parametrize(
    ("halt", "go_on"),
    [("/pause?mode=keep", "/resume"), ("/sleep?level=0&mode=keep", "/wake_up")],
)
async def test_pause_and_sleep_keep_everybody(engine: EngineCalls, halt: str, go_on: str) -> None:
    alone = await engine.text("kept", max_tokens=24)
    async with engine.rows_beside() as answers:
        await engine.order(halt)
        try:
            call = asyncio.create_task(engine.text("kept", max_tokens=24))
            await asyncio.sleep(0.5)
            num_answers = len(answers)
            await asyncio.sleep(0.5)
            assert not call.done() and len(answers) == num_answers
        finally:
            await engine.order(go_on)
        assert await call == alone


async def test_a_pause_that_waits_lets_running_work_end(engine: EngineCalls) -> None:
    async with engine.rows_beside():
        call = asyncio.create_task(engine.text("drained", max_tokens=24))
        await asyncio.sleep(0.2)
        await engine.order("/pause?mode=wait")
        try:
            assert await engine.gauge("vllm:num_requests_running") == 0
        finally:
            await engine.order("/resume")
        assert await call


async def test_more_adapters_than_slots_for_calls_and_rows(engine: EngineCalls) -> None:
    await check_more_adapters_than_slots(engine)


async def test_two_api_servers_feed_one_scheduler(
    combined: ManagedSettings, engine: EngineCalls
) -> None:
    servers = set(re.findall(r"\((ApiServer_\d) pid=", combined.log_path.read_text("utf-8")))
    assert servers == {"ApiServer_0", "ApiServer_1"}
    before = await engine.gauge("vllm:request_success_total")
    async with AsyncExitStack() as stack, engine.rows_beside() as answers:
        others = [EngineCalls(combined.base_url) for _ in range(8)]
        for other in others:
            stack.push_async_callback(other.close)
        texts = await asyncio.gather(*(other.text("same") for other in others))
    assert len(set(texts)) == 1
    wanted = before + 8 + len(answers)
    assert await engine.gauge_of_at_least("vllm:request_success_total", wanted) == wanted


async def test_a_hybrid_model_keeps_vllms_free_queue_and_answers(hybrid: EngineCalls) -> None:
    alone = await hybrid.text(DOCUMENT, max_tokens=24)
    async with hybrid.rows_beside():
        assert await hybrid.text(DOCUMENT, max_tokens=24) == alone


async def test_prompt_logprobs(hybrid: EngineCalls) -> None:
    async def prompt_logprobs() -> list[float]:
        answer = await hybrid.complete("one two three four", prompt_logprobs=1, max_tokens=1)
        told = answer["choices"][0]["prompt_logprobs"]
        assert told[0] is None
        return [next(iter(position.values()))["logprob"] for position in told[1:]]

    alone = await prompt_logprobs()
    async with hybrid.rows_beside():
        beside = await prompt_logprobs()
    assert len(beside) > 2 and beside == pytest.approx(alone, abs=1e-4)


async def test_speculative_decoding_is_refused_when_the_engine_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    argument = f"--speculative-config={json.dumps(speculation)}"
    managed = ManagedEngine(settings_of(tmp_path, tiny_model, argument))
    with pytest.raises(EngineError) as caught:
        await managed.start()
    await managed.stop()
    line = str(caught.value)
    assert "batchrun's scheduler cannot be combined with speculative decoding" in line
    assert "--speculative-config" in line and "\n" not in line
