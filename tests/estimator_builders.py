"""Steps and step laws with known coefficients, for the estimator's tests."""

from __future__ import annotations

import random
from pathlib import Path

from batchrun.estimator.fits import fit_all
from batchrun.estimator.profile import (
    CalibrationProfile,
    EngineIdentity,
    IdenticalSpread,
    OnlineLatency,
)
from batchrun.estimator.step_load import Observation, StepLoad
from batchrun.estimator.step_time import (
    EchoBaseModel,
    EchoModel,
    LinearModel,
    RooflineModel,
    StepTimeModel,
)

A100_LAW = RooflineModel(
    base_s=3e-3,
    token_s=16e9 / 220e12,
    pair_s=4 * 4096 * 32 / 220e12,
    weights_s=16e9 / 1.4e12,
    context_s=131_072 / 1.4e12,
    unhidden=0.25,
)
ECHO_LAW = EchoModel(
    prefill_square_s=2e-9,
    prefill_token_s=7e-5,
    prefill_floor_s=15e-3,
    decode_max_s=4e-7,
    decode_mean_s=2e-6,
    mix=0.8,
)
ECHO_BASE_LAW = EchoBaseModel(
    prefill_square_s=1.2e-9,
    prefill_token_s=7.3e-5,
    prefill_floor_s=3e-3,
    decode_max_s=3e-7,
    decode_mean_s=8e-7,
    mix=0.8,
    base_s=12e-3,
)
LINEAR_LAW = LinearModel(
    base_s=4e-3, token_s=8e-5, pair_s=3e-9, decode_context_s=9e-8, request_s=2e-5
)


def random_load(rng: random.Random) -> StepLoad:
    """A step of prefills, of decodes or of both (half of all), with sizes that engines see."""
    load = StepLoad()
    kind = rng.choice(("prefill", "decode", "mixed", "mixed"))
    if kind != "prefill":
        longest_tokens = rng.choice((1000, 4000, 20_000))
        for _ in range(rng.choice((1, 4, 16, 64, 200))):
            load.add(1, rng.randint(50, longest_tokens), is_decode=True)
    if kind != "decode":
        for _ in range(rng.choice((1, 1, 2, 5))):
            chunk_tokens = int(2 ** rng.uniform(4, 11))
            computed_tokens = rng.choice((0, 0, rng.randint(0, 25_000)))
            load.add(chunk_tokens, chunk_tokens + computed_tokens)
    return load


def random_loads(seed: int, num_loads: int) -> list[StepLoad]:
    rng = random.Random(seed)
    return [random_load(rng) for _ in range(num_loads)]


def observed(law: StepTimeModel, loads: list[StepLoad]) -> list[Observation]:
    return [(load, law.predict_s(load)) for load in loads]


def observed_with_noise(law: StepTimeModel, loads: list[StepLoad], seed: int) -> list[Observation]:
    """Log-normal noise of 10 %, and one step in a hundred takes three times as long."""
    rng = random.Random(seed)
    return [
        (load, law.predict_s(load) * rng.lognormvariate(0, 0.1) * rng.choices((1, 3), (99, 1))[0])
        for load in loads
    ]


def mape(model: StepTimeModel, law: StepTimeModel, loads: list[StepLoad]) -> float:
    """Mean absolute percentage error, as a share, against the law without noise."""
    errors = [abs(model.predict_s(load) / law.predict_s(load) - 1) for load in loads]
    return sum(errors) / len(errors)


def write_profile(path: Path, *, block_tokens: int, online: OnlineLatency | None = None) -> None:
    """The profile of an engine with 100 blocks of KV."""
    profile = CalibrationProfile(
        engine=EngineIdentity("tiny", "0.32.0", "cpu", "float32", block_tokens),
        kv_blocks=100,
        fitted=tuple(fit_all(observed(LINEAR_LAW, random_loads(0, 20)))),
        spread=IdenticalSpread(0.0, 0, 0),
        pivot_tokens=64,
        online=online,
        measured_at=1.0,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
