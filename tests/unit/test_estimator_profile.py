"""A calibration profile comes back as it was written; anything else is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from estimator_builders import A100_LAW, observed_with_noise, random_loads
from msgspec.structs import replace

from batchrun.errors import ConfigError
from batchrun.estimator.fits import fit_all
from batchrun.estimator.online_fit import OnlineFit
from batchrun.estimator.profile import (
    CalibrationProfile,
    EngineIdentity,
    IdenticalSpread,
    OnlineLatency,
    profile_from_json,
)
from batchrun.estimator.step_load import StepGap

ENGINE = EngineIdentity("meta-llama/Llama-3.1-8B", "0.32.0", "cpu", "float32", 128)
ZEROES = ("base_s", "token_s", "pair_s", "weights_s", "context_s")
ONLINE = OnlineLatency(200, 9.5, 0.02, 0.08, 0.006, 0.011)


@pytest.fixture(scope="module")
def profile() -> CalibrationProfile:
    fitted = fit_all(observed_with_noise(A100_LAW, random_loads(1, 60), seed=1))
    return CalibrationProfile(
        ENGINE,
        kv_blocks=8600,
        fitted=tuple(fitted),
        spread=IdenticalSpread(0.07, 40, 10),
        pivot_tokens=512,
        online=ONLINE,
        measured_at=1.75e9,
    )


def test_a_profile_survives_its_file(profile: CalibrationProfile) -> None:
    assert profile_from_json(profile.to_json(), "engine.json") == profile


def test_a_profile_of_an_engine_that_answered_no_calls_survives_its_file(
    profile: CalibrationProfile,
) -> None:
    silent = replace(profile, online=None)

    assert profile_from_json(silent.to_json(), "engine.json") == silent


def test_a_profile_with_gaps_between_steps_survives_its_file(profile: CalibrationProfile) -> None:
    with_gap = replace(profile, gap=StepGap(2e-4, 3e-5))

    assert profile_from_json(with_gap.to_json(), "engine.json") == with_gap


def test_a_profile_from_before_gaps_and_limits_is_read(profile: CalibrationProfile) -> None:
    record = json.loads(profile.to_json())
    del record["gap"], record["token_budget"], record["max_running"]

    assert profile_from_json(json.dumps(record), "engine.json") == profile


def test_the_online_fit_starts_from_a_profile(profile: CalibrationProfile) -> None:
    fit = OnlineFit(profile.models)

    assert fit.best() == profile.fitted[0].model
    assert set(fit.models.values()) == set(profile.models)


def test_a_profile_of_another_engine_says_what_differs(profile: CalibrationProfile) -> None:
    assert profile.mismatch(ENGINE) is None
    assert profile.mismatch(replace(ENGINE, vllm_version="0.33.0", block_tokens=16)) == (
        "measured with another vllm_version '0.32.0' (here '0.33.0'), block_tokens 128 (here 16)"
    )


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        record = json.loads(text)
        change(record)
        return json.dumps(record)

    return apply


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-20], "engine.json: not JSON"),
        (lambda _: "[]", "Expected `object`, got `array`"),
        (broken(lambda r: r.update(version=2)), r"Invalid value 2 - at `\$\.version`"),
        (broken(lambda r: r.update(note="x")), "contains unknown field `note`"),
        (broken(lambda r: r.pop("engine")), "missing required field `engine`"),
        (broken(lambda r: r["engine"].pop("device")), r"field `device` - at `\$\.engine`"),
        (broken(lambda r: r["engine"].update(model="")), r"length >= 1 - at `\$\.engine\.model`"),
        (broken(lambda r: r["engine"].update(block_tokens=0)), r"`int` >= 1 - at .*block_tokens"),
        (broken(lambda r: r.update(pivot_tokens=1.5)), "Expected `int`, got `float` - at .*pivot"),
        (broken(lambda r: r.update(measured_at="now")), "Expected `float`, got `str` - at"),
        (broken(lambda r: r.update(kv_blocks=0)), r"`int` >= 1 - at `\$\.kv_blocks`"),
        (broken(lambda r: r["spread"].update(num_steps=-1)), r"`int` >= 0 - at .*num_steps"),
        (broken(lambda r: r["online"].pop("ttft_p99_s")), r"field `ttft_p99_s` - at `\$\.online`"),
        (broken(lambda r: r["online"].update(ttft_p99_s=None)), r"`float`, got `null` - at"),
        (broken(lambda r: r.update(gap={"base_s": 0.1})), r"field `request_s` - at `\$\.gap`"),
        (broken(lambda r: r.update(gap={"base_s": -1, "request_s": 0})), r">= 0.* - at .*base_s"),
        (
            broken(lambda r: r["fitted"][0]["model"].update(dict.fromkeys(ZEROES, 0))),
            "by its model roofline every step takes 0 s",
        ),
        (broken(lambda r: r.update(fitted=[])), r"length >= 1 - at `\$\.fitted`"),
        (broken(lambda r: r["fitted"].append(r["fitted"][0])), "fitted names a model twice"),
        (broken(lambda r: r["fitted"][0]["model"].update(model="x")), "Invalid value 'x' - at"),
        (broken(lambda r: r["fitted"][0]["model"].update(bias=1)), "unknown field `bias` - at"),
        (broken(lambda r: r["fitted"][0].update(held_out_mape=-1)), r">= 0.* - at .*held_out_mape"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(
    profile: CalibrationProfile, damage: Callable[[str], str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        profile_from_json(damage(profile.to_json()), "engine.json")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("engine.json: ")
