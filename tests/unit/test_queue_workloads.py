"""The calls of `benchmarks.online_queue`: who shares what, and what each is promised."""

from __future__ import annotations

import pytest

from benchmarks.online_queue import SCENARIOS, rates_of
from benchmarks.queue_calls import PromisedCalls, alone_s
from benchmarks.queue_workloads import (
    GROUP_TOKENS,
    OPEN_DOCUMENTS,
    TTFT_FACTORS,
    accelgen_calls,
    agent_calls,
    loogle_calls,
)

CALLS_S = 30.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_draws_the_same_calls_from_a_seed_and_others_from_another(name: str) -> None:
    draw = SCENARIOS[name][0]
    rate = rates_of(name, (0.0,))[0]
    calls = draw(rate, CALLS_S, 0)

    assert calls == draw(rate, CALLS_S, 0) != draw(rate, CALLS_S, 1)
    assert len(calls) == pytest.approx(rate * CALLS_S, rel=0.5)
    arrivals = [call.arrival_at_s for call in calls]
    assert arrivals == sorted(arrivals)
    assert all(sum(tokens for _, tokens in c.parts) <= c.num_prompt_tokens for c in calls)


def test_a_turn_of_an_agent_begins_with_the_whole_of_the_turn_before() -> None:
    calls = agent_calls(6.0, CALLS_S, 0)
    prompts = {call.parts for call in calls}
    later = [call for call in calls if len(call.parts) > 2]

    assert len(later) > len(calls) / 3
    assert all(call.parts[:-2] in prompts for call in later)
    assert len({call.parts[0] for call in calls}) == 1


def test_questions_about_a_document_have_its_tokens_in_common() -> None:
    calls = loogle_calls(2.0, CALLS_S, 0)
    source = PromisedCalls(calls, 0)
    prompts = [arrival.prompt_token_ids for arrival in source.take_due(CALLS_S)]

    documents = {call.parts: prompt for call, prompt in zip(calls, prompts, strict=True)}
    assert len(documents) <= OPEN_DOCUMENTS < len(calls)
    for call, prompt in zip(calls, prompts, strict=True):
        ((_, tokens),) = call.parts
        assert len(prompt) == call.num_prompt_tokens
        assert prompt[:tokens] == documents[call.parts][:tokens]


def test_accelgens_first_tokens_are_due_after_what_prompts_like_theirs_take_alone() -> None:
    for call in accelgen_calls(5.0, CALLS_S, 0):
        group = call.num_prompt_tokens // GROUP_TOKENS
        alone = alone_s(round((group + 0.5) * GROUP_TOKENS))
        assert TTFT_FACTORS[0] <= call.promise.ttft_s / alone <= TTFT_FACTORS[1]
    assert {call.promise.name for call in accelgen_calls(5.0, CALLS_S, 0, "alpaca")} == {"alpaca"}
    assert all(c.num_prompt_tokens > 4_000 for c in accelgen_calls(5.0, CALLS_S, 0, "1.0"))
