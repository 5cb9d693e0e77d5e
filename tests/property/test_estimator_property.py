"""The estimator under random steps: totals are exact, more work never takes less time."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
from estimator_builders import A100_LAW, ECHO_BASE_LAW, ECHO_LAW, LINEAR_LAW, random_load
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.estimator.forecast import KvForecast
from batchrun.estimator.online_fit import OnlineFit
from batchrun.estimator.step_load import StepLoad, StepTable
from batchrun.estimator.step_time import (
    AnyModel,
    EchoBaseModel,
    EchoModel,
    LinearModel,
    RooflineModel,
    largest_chunk,
)

decodes = st.tuples(st.just(1), st.integers(1, 40_000), st.just(True))
prefills = st.tuples(st.integers(1, 9000), st.integers(0, 40_000)).map(
    lambda each: (each[0], each[0] + each[1], False)
)
requests = st.lists(st.one_of(decodes, prefills), max_size=40)
coefficients = st.floats(0, 1e-3)
shares = st.floats(0, 1)
models: st.SearchStrategy[AnyModel] = st.one_of(
    st.builds(EchoModel, *[coefficients] * 5, shares),
    st.builds(EchoBaseModel, *[coefficients] * 5, shares, coefficients),
    st.builds(LinearModel, *[coefficients] * 5),
    st.builds(RooflineModel, *[coefficients] * 5, shares),
)


@given(requests, st.data())
def test_removing_what_was_added_equals_never_adding_it(
    items: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))
    load = StepLoad.of(data.draw(st.permutations(items)))
    for (new_tokens, context_tokens, is_decode), keep in zip(items, kept, strict=True):
        if not keep:
            load.remove(new_tokens, context_tokens, is_decode=is_decode)

    left = [item for item, keep in zip(items, kept, strict=True) if keep]
    assert load == StepLoad.of(left)


@given(requests)
def test_totals_equal_recomputation(items: list[tuple[int, int, bool]]) -> None:
    load = StepLoad.of(items)
    contexts = [context for _, context, is_decode in items if is_decode]

    assert load.attention_pairs == sum(new * (context - new / 2) for new, context, _ in items)
    assert load.context_tokens == sum(context for _, context, _ in items)
    assert load.max_decode_context_tokens == max(contexts, default=0)
    assert load.decode_context_tokens == sum(contexts)
    assert (load.num_decodes, load.num_requests) == (len(contexts), len(items))


@given(requests, requests)
def test_a_copy_lives_its_own_life(
    items: list[tuple[int, int, bool]], more: list[tuple[int, int, bool]]
) -> None:
    load = StepLoad.of(items)
    copy = load.copy()
    for new_tokens, context_tokens, is_decode in more:
        copy.add(new_tokens, context_tokens, is_decode=is_decode)

    assert load == StepLoad.of(items)
    assert copy == StepLoad.of([*items, *more])


@given(models, requests, st.integers(0, 30_000), st.floats(0, 5), st.floats(0, 5))
def test_more_time_never_means_a_smaller_chunk(
    model: AnyModel,
    items: list[tuple[int, int, bool]],
    computed_tokens: int,
    limit_s: float,
    more_s: float,
) -> None:
    load = StepLoad.of(items)

    chunk_tokens = largest_chunk(model, load, computed_tokens, limit_s, 4096)
    longer_tokens = largest_chunk(model, load, computed_tokens, limit_s + more_s, 4096)

    assert 0 <= chunk_tokens <= longer_tokens <= 4096
    if chunk_tokens:
        load.add(chunk_tokens, computed_tokens + chunk_tokens)
        assert model.predict_s(load) <= limit_s


@given(models, st.integers(1, 500), st.integers(0, 20_000), requests)
def test_a_longer_chunk_never_takes_less(
    model: AnyModel, more_tokens: int, computed_tokens: int, items: list[tuple[int, int, bool]]
) -> None:
    shorter, longer = StepLoad.of(items), StepLoad.of(items)
    shorter.add(200, computed_tokens + 200)
    longer.add(200 + more_tokens, computed_tokens + 200 + more_tokens)

    assert model.predict_s(shorter) <= model.predict_s(longer) * (1 + 1e-12)


def read_back(model: AnyModel) -> AnyModel:
    again: AnyModel = msgspec.json.decode(msgspec.json.encode(model), type=AnyModel)
    return again


@given(models)
def test_any_model_survives_its_record(model: AnyModel) -> None:
    assert read_back(model) == model


@given(st.integers(0, 2**32))
def test_a_table_holds_the_loads_it_was_made_of(seed: int) -> None:
    rng = random.Random(seed)
    loads = [random_load(rng) for _ in range(5)]
    laws = (A100_LAW, ECHO_LAW, ECHO_BASE_LAW, LINEAR_LAW)

    table = StepTable.of([(load, laws[i % 4].predict_s(load)) for i, load in enumerate(loads)])

    assert [*table.tokens] == [load.num_tokens for load in loads]
    assert [*table.pairs] == [load.attention_pairs for load in loads]
    assert [*table.context] == [load.context_tokens for load in loads]
    assert [*table.decode_context] == [load.decode_context_tokens for load in loads]
    assert [*table.requests] == [load.num_requests for load in loads]
    assert [*table.decodes] == [load.num_decodes for load in loads]
    assert [*table.max_decode_context] == [load.max_decode_context_tokens for load in loads]


@settings(max_examples=40, deadline=None)
@given(st.lists(requests.filter(len), min_size=1, max_size=4), st.data())
def test_the_online_fit_stays_finite_whatever_it_sees(
    kinds: list[list[tuple[int, int, bool]]], data: st.DataObject
) -> None:
    fit = OnlineFit()
    durations = data.draw(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5))
    for i in range(96):
        fit.observe(StepLoad.of(kinds[i % len(kinds)]), durations[i % len(durations)])

    for model in fit.models.values():
        assert read_back(model) == model
        assert all(math.isfinite(model.predict_s(StepLoad.of(items))) for items in kinds)


@given(st.lists(st.integers(0, 10_000), min_size=5, max_size=80))
def test_the_forecast_of_any_series_is_numpys(blocks: list[int]) -> None:
    forecast = KvForecast(window_s=20, least_data_s=5, sigmas=1.5)
    for second, value in enumerate(blocks):
        forecast.sample(second, 0)
        forecast.sample(second + 0.5, value)
        forecast.sample(second + 0.9, 0)
    forecast.sample(len(blocks), 0)

    window = np.array(blocks[-20:])
    expected = window.mean() + 1.5 * window.std()
    assert forecast.forecast_blocks is not None
    assert abs(forecast.forecast_blocks - math.ceil(expected - 1e-9)) <= 1
    assert forecast.forecast_blocks >= expected - 1e-6
