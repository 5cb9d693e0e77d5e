"""The step-time models say what their formulas say, and their records come back equal."""

from __future__ import annotations

import msgspec
import pytest
from estimator_builders import A100_LAW, ECHO_BASE_LAW, ECHO_LAW, LINEAR_LAW, random_loads

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import (
    AnyModel,
    EchoModel,
    LinearModel,
    RooflineModel,
    largest_chunk,
    pivot_tokens,
)

LAWS = (A100_LAW, ECHO_LAW, ECHO_BASE_LAW, LINEAR_LAW)
TENS = EchoModel(1.0, 10.0, 500.0, 2.0, 3.0, 0.75)


def test_a_load_counts_what_it_was_given() -> None:
    load = StepLoad.of([(1, 100, True), (1, 300, True), (50, 50, False), (1, 20, False)])

    assert (load.num_requests, load.num_tokens, load.context_tokens) == (4, 53, 470)
    assert (load.num_decodes, load.decode_context_tokens) == (2, 400)
    assert load.max_decode_context_tokens == 300
    assert load.attention_pairs == 50 * 25 + 1 * 19.5 + 99.5 + 299.5


def test_the_chunks_of_a_prompt_have_the_pairs_of_the_whole() -> None:
    chunks = StepLoad.of([(100, 100, False), (7, 107, False), (893, 1000, False)])
    whole = StepLoad.of([(1000, 1000, False)])

    assert chunks.attention_pairs == whole.attention_pairs == 1000**2 / 2


def test_removing_the_longest_decode_leaves_the_next() -> None:
    load = StepLoad.of([(1, 100, True), (1, 300, True), (1, 300, True)])

    load.remove(1, 300, is_decode=True)
    assert load.max_decode_context_tokens == 300
    load.remove(1, 300, is_decode=True)
    assert load.max_decode_context_tokens == 100


def test_removing_a_decode_that_is_not_there_is_an_error_and_changes_nothing() -> None:
    load = StepLoad.of([(1, 100, True)])

    with pytest.raises(ValueError, match="not in list"):
        load.remove(1, 99, is_decode=True)
    assert load == StepLoad.of([(1, 100, True)])


@pytest.mark.parametrize(
    ("requests", "expected_s"),
    [
        ([(16, 16, False)], 500.0),  # the floor: 16^2 + 10 * 16 is less
        ([(30, 30, False)], 30**2 + 10 * 30),
        ([(10, 40, False)], 40**2 - 30**2 + 10 * 10),  # a chunk: context^2 - computed^2
        ([(1, 100, True), (1, 200, True)], 2 * 200 + 3 * 150),
        ([(30, 30, False), (1, 100, True)], 0.75 * 1200 + 0.25 * 500),
        ([(30, 30, False), (1, 400, True)], 0.75 * 2000 + 0.25 * 1200),
    ],
)
def test_echo_predicts_equations_6_to_8(
    requests: list[tuple[int, int, bool]], expected_s: float
) -> None:
    assert TENS.predict_s(StepLoad.of(requests)) == expected_s


def test_echo_with_a_base_adds_it_once() -> None:
    load = StepLoad.of([(300, 4000, False), (1, 900, True)])
    without = EchoModel(1.2e-9, 7.3e-5, 3e-3, 3e-7, 8e-7, 0.8)

    assert ECHO_BASE_LAW.predict_s(load) == pytest.approx(12e-3 + without.predict_s(load))


def test_linear_predicts_its_five_terms() -> None:
    load = StepLoad.of([(10, 30, False), (1, 100, True)])

    assert LinearModel(1.0, 10.0, 100.0, 0.5, 7.0).predict_s(load) == (
        1 + 10 * 11 + 100 * (10 * 25 + 99.5) + 0.5 * 100 + 7 * 2
    )


def test_the_roofline_of_the_a100_law_matches_the_arithmetic_of_the_scenario() -> None:
    items = [(512, 8000, False), (1, 900, True), (1, 12_000, True)]
    flop = 16e9 * 514 + sum(4 * n * (c - n / 2) * 4096 * 32 for n, c, _ in items)
    compute_s, memory_s = flop / 220e12, (16e9 + 131_072 * 20_900) / 1.4e12

    expected_s = 0.003 + max(compute_s, memory_s) + 0.25 * min(compute_s, memory_s)
    assert A100_LAW.predict_s(StepLoad.of(items)) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_step_without_requests_takes_no_time(law: AnyModel) -> None:
    assert law.predict_s(StepLoad()) == 0.0


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_largest_chunk_is_the_last_that_fits(law: AnyModel) -> None:
    for load in random_loads(seed=3, num_loads=60):
        before = load.copy()
        limit_s = law.predict_s(load) + 0.02
        chunk_tokens = largest_chunk(law, load, 700, limit_s, 2048)

        fits = [_with_chunk(law, load, size) <= limit_s for size in range(1, 2049)]
        assert chunk_tokens == sum(fits)
        assert load == before


def _with_chunk(law: AnyModel, load: StepLoad, chunk_tokens: int) -> float:
    more = load.copy()
    more.add(chunk_tokens, 700 + chunk_tokens)
    return law.predict_s(more)


def test_the_largest_chunk_is_bounded_and_may_be_none() -> None:
    load = StepLoad()

    assert largest_chunk(A100_LAW, load, 0, limit_s=100.0, most_tokens=512) == 512
    assert largest_chunk(A100_LAW, load, 0, limit_s=0.001, most_tokens=512) == 0
    assert largest_chunk(A100_LAW, load, 0, limit_s=100.0, most_tokens=0) == 0


def test_the_pivot_is_the_first_size_near_the_best_throughput() -> None:
    model = LinearModel(9e-3, 1e-4, 0.0, 0.0, 0.0)

    # n / (9e-3 + 1e-4 n) over its value at 8,192 is 0.9 first at 724 tokens.
    best = 8192 / (9e-3 + 0.8192)
    pivot = pivot_tokens(model, 8192)
    assert pivot / (9e-3 + 1e-4 * pivot) >= 0.9 * best > (pivot - 1) / (9e-3 + 1e-4 * (pivot - 1))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_model_survives_its_record(law: AnyModel) -> None:
    assert msgspec.json.decode(msgspec.json.encode(law), type=AnyModel) == law


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "magic"}, "Invalid value 'magic'"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"token_s": -1e-9}, r">= 0.* - at `\$\.token_s`"),
        ({"token_s": True}, "Expected `float`, got `bool`"),
        ({"token_s": "fast"}, "Expected `float`, got `str`"),
        ({"unhidden": 1.5}, r"<= 1.* - at `\$\.unhidden`"),
    ],
)
def test_a_wrong_record_is_refused_in_one_line(change: dict[str, object], complaint: str) -> None:
    record = msgspec.to_builtins(RooflineModel(1, 1, 1, 1, 1, 1)) | change
    with pytest.raises(msgspec.ValidationError, match=complaint) as refused:
        msgspec.json.decode(msgspec.json.encode(record), type=AnyModel)
    assert "\n" not in str(refused.value)
