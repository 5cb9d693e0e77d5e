"""Probes from an engine's limits, its recording, the spread of identical steps."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from estimator_builders import LINEAR_LAW, observed, random_loads
from msgspec.structs import replace

from batchrun.errors import EngineError
from batchrun.estimator.probes import Probe, ProbeCall, PromptMaker, make_round
from batchrun.estimator.profile import (
    EngineFacts,
    EngineIdentity,
    Recording,
    calibrate,
    facts_line,
    identical_spread,
    read_recording,
    step_line,
)
from batchrun.estimator.step_load import StepLoad

FACTS = EngineFacts(
    EngineIdentity("llama", "0.32.0", "cpu", "float32", 16),
    kv_blocks=8600,
    longest_tokens=32_768,
    token_budget=2048,
    max_running=256,
    vocabulary=2048,
)


def calls_of(probes: list[Probe]) -> list[ProbeCall]:
    return [call for probe in probes for calls in probe.callers for call in calls]


def test_a_recording_comes_back_as_it_was_written() -> None:
    observations = observed(LINEAR_LAW, random_loads(0, 50))
    text = facts_line(FACTS) + "".join(step_line(load, step_s) for load, step_s in observations)

    assert read_recording(text) == Recording(FACTS, observations, gaps=[])


def test_gaps_between_steps_are_recorded_beside_the_steps() -> None:
    (first, first_s), (second, second_s) = observed(LINEAR_LAW, random_loads(0, 2))
    before = facts_line(FACTS) + step_line(first, first_s)
    whole = read_recording(before + step_line(second, second_s, (3, 0.002)))

    assert whole.gaps == [(3, 0.002)]
    later = whole.after(read_recording(before))
    assert (later.observations, later.gaps) == ([(second, second_s)], [(3, 0.002)])


def test_a_calibration_finds_the_line_of_the_gaps_despite_outliers() -> None:
    observations = observed(LINEAR_LAW, random_loads(0, 200))
    rng = random.Random(0)
    sizes = [rng.randint(1, 64) for _ in range(400)]
    gaps = [(size, (2e-4 + 3e-5 * size) * rng.choices((1, 5), (50, 1))[0]) for size in sizes]

    gap = calibrate(Recording(FACTS, observations, gaps), measured_at=0.0).gap

    assert gap is not None
    assert gap.predict_s(1) == pytest.approx(2.3e-4, rel=0.1)
    assert gap.predict_s(64) == pytest.approx(2.12e-3, rel=0.05)


def test_an_engine_that_schedules_ahead_has_no_gaps() -> None:
    observations = observed(LINEAR_LAW, random_loads(0, 200))

    assert calibrate(Recording(FACTS, observations), measured_at=0.0).gap is None


def test_few_gaps_of_a_slow_engine_hold_for_every_size() -> None:
    observations = observed(LINEAR_LAW, random_loads(0, 47))
    gaps = [(1, 0.002)] * 10 + [(1, 0.5)] + [(4, 0.002)] * 3

    gap = calibrate(Recording(FACTS, observations, gaps), measured_at=0.0).gap

    assert gap is not None
    assert gap.predict_s(64) == gap.predict_s(1) == 0.002


def test_stray_gaps_do_not_hide_that_an_engine_schedules_ahead() -> None:
    observations = observed(LINEAR_LAW, random_loads(0, 800))

    profile = calibrate(Recording(FACTS, observations, [(2, 0.001)] * 60), measured_at=0.0)

    assert profile.gap is None


@pytest.mark.parametrize("text", ["", "[]\n", "{}\n", '{"engine": {}}\n', facts_line(FACTS) + "{"])
def test_another_file_is_no_recording(text: str) -> None:
    with pytest.raises(EngineError, match="record of its steps cannot be read") as refused:
        read_recording(text)
    assert "\n" not in str(refused.value)


def test_the_spread_is_the_error_of_the_median_of_each_group() -> None:
    often, seldom = StepLoad.of([(8, 8, False)]), StepLoad.of([(9, 9, False)])
    steps = [(often, step_s) for step_s in (0.5, 1.0, 1.0, 1.0, 2.0)]
    steps += [(seldom, step_s) for step_s in (7.0, 8.0, 8.0, 9.0)]

    spread = identical_spread(steps)

    assert (spread.num_groups, spread.num_steps) == (1, 5)
    assert spread.mean_ape == pytest.approx((1.0 + 0.5) / 5)


def test_steps_that_all_differ_show_no_spread() -> None:
    assert identical_spread([(StepLoad.of([(1, 1, False)]), 1.0)]).num_steps == 0


def test_the_spread_of_a_noisy_law_is_its_noise() -> None:
    rng = random.Random(0)
    loads = random_loads(0, 40) * 40

    spread = identical_spread([(load, rng.lognormvariate(0, 0.1)) for load in loads])

    assert spread.num_groups == 40
    assert spread.mean_ape == pytest.approx(0.08, abs=0.005)


def test_a_round_has_every_kind_of_step_within_the_engines_limits() -> None:
    probes = make_round(FACTS)

    assert {probe.stage for probe in probes} == {
        "prefills",
        "prefills behind cached prefixes",
        "decodes",
        "prefills beside decodes",
    }
    assert max(len(probe.callers) for probe in probes) == FACTS.max_running
    assert max(call.fresh_tokens for call in calls_of(probes)) == 3 * FACTS.token_budget


def test_the_first_tenth_of_a_rounds_tokens_holds_every_kind_of_step() -> None:
    """What a slow engine gets to."""
    probes = make_round(FACTS)
    sums = list(accumulate(probe.num_tokens for probe in probes))

    early = {p.stage for p, total in zip(probes, sums, strict=True) if total < 0.1 * sums[-1]}

    assert early == {probe.stage for probe in probes}


def test_callers_side_by_side_share_no_context() -> None:
    for probe in make_round(FACTS):
        contexts = [{call.prefix_tokens for call in calls} for calls in probe.callers]
        held = [context for context in contexts if context != {0}]
        assert len(held) < 2 or len(set.union(*held)) == len(held)


def test_a_crowd_fills_steps_with_decodes_beside_prompts() -> None:
    crowd = make_round(replace(FACTS, kv_blocks=20_000))[-1]

    assert crowd.callers == ((ProbeCall(1024, 128),),) * 64


@pytest.mark.parametrize("kv_blocks", [32, 100, 1000, 8600])
@pytest.mark.parametrize("longest_tokens", [256, 2048, 32_768])
def test_a_probe_never_asks_for_more_than_the_engine_holds(
    kv_blocks: int, longest_tokens: int
) -> None:
    facts = replace(FACTS, kv_blocks=kv_blocks, longest_tokens=longest_tokens, max_running=64)

    for probe in make_round(facts):
        calls = [max(calls, key=lambda call: call.fresh_tokens) for calls in probe.callers]
        tokens = [call.prefix_tokens + call.fresh_tokens + call.output_tokens for call in calls]
        own_tokens = sum(tokens)
        assert len(calls) <= facts.max_running
        assert max(tokens) <= facts.longest_tokens
        assert own_tokens <= facts.kv_tokens


def test_an_engine_that_holds_too_little_is_refused_in_one_line() -> None:
    with pytest.raises(EngineError, match=r"at most 248 tokens twice.*needs 256.*KV cache"):
        make_round(replace(FACTS, kv_blocks=31))


def test_prompts_share_their_prefix_within_a_round_and_nothing_else() -> None:
    prompts = PromptMaker(vocabulary=2048)
    call = ProbeCall(fresh_tokens=64, prefix_tokens=512)
    first, second = prompts.prompt(call), prompts.prompt(call)
    prompts.next_round()
    third = prompts.prompt(call)

    assert len(first) == 576
    assert first[:512] == second[:512] != third[:512]
    assert first[512:] != second[512:]
    assert all(256 <= token < 1024 for token in first)


def test_too_few_steps_make_no_profile() -> None:
    with pytest.raises(EngineError, match="computed only 3 steps"):
        calibrate(Recording(FACTS, observed(LINEAR_LAW, random_loads(0, 3))), measured_at=0.0)
