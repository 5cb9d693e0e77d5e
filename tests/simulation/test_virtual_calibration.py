"""A calibration on the virtual clock finds exact laws exactly, and an engine starts from it."""

from __future__ import annotations

import json
import logging
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as struct_replace

from batchrun.estimator.online_fit import COLD_START
from batchrun.estimator.probes import PROBING_SETTINGS, PromptMaker, make_round
from batchrun.estimator.profile import (
    CalibrationProfile,
    OnlineLatency,
    Recording,
    calibrate,
    read_recording,
)
from batchrun.estimator.step_time import EchoBaseModel, LinearModel, RooflineModel
from batchrun.hints import HINT_KEY
from batchrun.simulator.cluster import EnginePlan, FrontEndTimes
from batchrun.simulator.scenario_file import EnginesSpec, SloSpec, calibrated, engine_of
from batchrun.simulator.virtual.engine import DEFAULT_TIMING, Timing, VirtualEngine
from batchrun.simulator.virtual.setup import A100Law, EngineShape, ModelLaw, StepLaw
from batchrun.vllm_plugin import estimates as calibration
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.laws import NoisyLaw, PoolingLaw
from benchmarks.row_feeds import ProbeSource

SHAPE = EngineShape(num_blocks=1200, token_budget=1024, max_num_seqs=16, max_model_len=4096)


def record(
    law: StepLaw,
    folder: Path,
    num_rounds: int = 1,
    timing: Timing = DEFAULT_TIMING,
    longest_s: float = math.inf,
) -> Recording:
    """The probes that begin in time, sent to a virtual engine which records its steps."""
    path, source = folder / "steps", ProbeSource()
    settings = {**PROBING_SETTINGS, "record_steps": str(path)}
    shape = replace(SHAPE, additional_config={HINT_KEY: settings})
    engine = VirtualEngine(ColocatedScheduler, shape, law, [source], timing)
    facts = read_recording(path.read_text()).facts
    prompts = PromptMaker(facts.vocabulary)
    for _ in range(num_rounds):
        prompts.next_round()
        for probe in make_round(facts):
            if engine.now_s < longest_s:
                source.begin(probe, prompts)
                engine.run_until(math.inf)
    return read_recording(path.read_text())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(A100Law(), tmp_path_factory.mktemp("a100"))


@pytest.fixture
def profile(recording: Recording) -> CalibrationProfile:
    return calibrate(recording, measured_at=1.0)


def scheduler_with(profile_path: Path) -> ColocatedScheduler:
    settings = {"batchrun": {"profile": str(profile_path)}}
    engine = VirtualEngine(
        ColocatedScheduler, replace(SHAPE, additional_config=settings), A100Law()
    )
    assert isinstance(engine.scheduler, ColocatedScheduler)
    return engine.scheduler


def test_the_engine_tells_what_it_is(recording: Recording) -> None:
    facts = recording.facts

    assert (facts.engine.device, facts.engine.dtype) == ("cpu", "float16")
    assert (facts.kv_blocks, facts.engine.block_tokens) == (1200, 16)
    assert (facts.longest_tokens, facts.token_budget, facts.max_running) == (4096, 1024, 16)


def test_a_roofline_is_found_exactly(profile: CalibrationProfile) -> None:
    best = profile.fitted[0]
    law = A100Law()

    assert isinstance(best.model, RooflineModel)
    assert best.held_out_mape < 1e-6
    assert best.model.unhidden == pytest.approx(law.overlap_loss, abs=1e-3)
    assert best.model.token_s == pytest.approx(law.flop_per_token / law.flop_per_s, rel=1e-3)
    assert (profile.pivot_tokens, profile.token_budget, profile.max_running) == (382, 1024, 16)


def test_a_law_of_echos_form_is_found_exactly(tmp_path: Path) -> None:
    profile = calibrate(record(PoolingLaw(), tmp_path), measured_at=1.0)

    assert isinstance(profile.fitted[0].model, EchoBaseModel)
    assert profile.fitted[0].held_out_mape < 1e-5
    assert profile.pivot_tokens == 550


def test_the_same_calibration_gives_the_same_profile(
    profile: CalibrationProfile, tmp_path: Path
) -> None:
    assert calibrate(record(A100Law(), tmp_path), measured_at=1.0) == profile


def test_under_noise_the_law_behind_it_is_found_within_3_percent(
    recording: Recording, tmp_path: Path
) -> None:
    noisy = record(NoisyLaw(A100Law(), random.Random(0)), tmp_path, num_rounds=3)

    profile = calibrate(noisy, measured_at=1.0)

    model = profile.fitted[0].model
    errors = [abs(model.predict_s(load) / step_s - 1) for load, step_s in recording.observations]
    assert sum(errors) / len(errors) <= 0.03
    assert 0.05 < profile.spread.mean_ape < 0.1


def test_an_engine_predicts_its_first_step_by_its_profile(
    profile: CalibrationProfile, recording: Recording, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())

    scheduler = scheduler_with(path)

    load, step_s = recording.observations[0]
    assert scheduler.state.estimates.predict_s(load) == pytest.approx(step_s, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "another"}, "measured with another model 'another'"),
        ({"vllm_version": "0.1"}, "measured with another vllm_version '0.1'"),
        ({"block_tokens": 128}, "measured with another block_tokens 128 (here 16)"),
        ({"block_tokens": None}, "Expected `int`, got `null` - at `$.engine.block_tokens`"),
    ],
)
def test_a_profile_of_another_engine_is_ignored_with_one_line(
    profile: CalibrationProfile,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object],
    complaint: str,
) -> None:
    document = json.loads(profile.to_json())
    document["engine"] |= change
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))

    with caplog.at_level(logging.WARNING, logger="batchrun"):
        scheduler = scheduler_with(path)

    assert scheduler.state.estimates.model == COLD_START
    (line,) = [message for message in caplog.messages if "profile" in message]
    assert complaint in line
    assert "\n" not in line


def test_a_profile_of_another_kv_size_holds(profile: CalibrationProfile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(struct_replace(profile, kv_blocks=99).to_json())

    assert scheduler_with(path).state.estimates.model == profile.models[0]


def test_a_record_is_bounded_and_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "MAX_RECORDED_STEPS", 7)

    recording = record(A100Law(), tmp_path)

    assert len(recording.observations) == 7
    assert (tmp_path / "steps").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def profile_without_steps_ahead(tmp_path: Path) -> CalibrationProfile:
    timing = Timing(1, planning_s=0.0005, request_s=2e-5)
    return calibrate(record(A100Law(), tmp_path, timing=timing), measured_at=1.0)


def test_the_gaps_of_an_engine_with_one_step_in_flight_are_found(
    profile_without_steps_ahead: CalibrationProfile,
) -> None:
    gap = profile_without_steps_ahead.gap

    assert gap is not None
    assert gap.base_s == pytest.approx(0.0005)
    assert gap.request_s == pytest.approx(2e-5)


def test_an_engine_that_schedules_a_step_ahead_shows_no_gaps(profile: CalibrationProfile) -> None:
    assert profile.gap is None


@pytest.mark.parametrize(
    ("timing", "steps_in_flight"), [(Timing(1, planning_s=0.002), 1), (DEFAULT_TIMING, 2)]
)
def test_a_slow_engine_shows_every_kind_of_step_and_how_it_schedules(
    tmp_path: Path, timing: Timing, steps_in_flight: int
) -> None:
    """A 7B model on a CPU, 40 tokens/s: what it gets to in 15 s."""
    slow = ModelLaw(LinearModel(0.3, 1 / 40, 0, 0, 0))
    recording = record(slow, tmp_path, timing=timing, longest_s=15.0)
    path = tmp_path / "profile.json"
    path.write_text(calibrate(recording, measured_at=1.0).to_json())

    plan = engine_of(EnginesSpec(steps=str(path)), SloSpec(), tmp_path)

    assert {load.kind for load, _ in recording.observations} == {0, 1, 2}
    assert plan.timing.steps_in_flight == steps_in_flight


def test_a_simulation_charges_the_gaps_of_a_profile(
    profile_without_steps_ahead: CalibrationProfile,
) -> None:
    plan = calibrated(EnginePlan(timing=Timing(1)), profile_without_steps_ahead)

    assert plan.timing.planning_s == pytest.approx(0.0005)
    assert plan.timing.request_s == pytest.approx(2e-5)


def test_a_simulation_charges_what_calls_take_outside_the_engine(
    profile: CalibrationProfile,
) -> None:
    online = OnlineLatency(9, 1.0, 0.1, 0.2, 0.01, 0.02, outside_s=0.03)

    plan = calibrated(EnginePlan(), struct_replace(profile, online=online))

    assert plan.front_end == FrontEndTimes(latency_s=0.03)
    unknown = struct_replace(online, outside_s=None)
    assert calibrated(EnginePlan(), struct_replace(profile, online=unknown)).front_end is None
    assert calibrated(EnginePlan(), profile).front_end is None


def test_a_step_ahead_hides_the_gaps_of_a_profile(
    profile_without_steps_ahead: CalibrationProfile,
) -> None:
    plan = calibrated(EnginePlan(timing=Timing(2)), profile_without_steps_ahead)

    assert plan.timing == Timing(2)
