"""What `batchrun calibrate` learned about one engine, as a JSON file.

An engine records facts about itself and a line for each step. From these follow the models of step
times, and how much steps differ that computed the very same, which no model can predict. The caller
reads and writes the files; nothing here touches the disk or a clock.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from batchrun.errors import ConfigError, EngineError
from batchrun.estimator.fits import LEAST_OBSERVATIONS, FittedModel, fit_all
from batchrun.estimator.step_load import (
    Observation,
    ObservedGap,
    StepGap,
    StepLoad,
    fit_gap,
    load_row,
)
from batchrun.estimator.step_time import AnyModel, model_from_record, model_to_record, pivot_tokens

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What a profile holds for: any other value makes the fitted times wrong."""

    model: str
    vllm_version: str
    device: str
    dtype: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's identity and its limits: of the KV cache, of one request, of one step."""

    engine: EngineIdentity
    kv_blocks: int
    longest_tokens: int
    """Prompt and output of one request."""
    token_budget: int
    """New tokens in one step."""
    max_running: int
    """Requests in one step."""
    vocabulary: int
    """Token ids run from 0 to this number, exclusive."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv_blocks * self.engine.block_tokens


LEAST_IDENTICAL = 5
"""Fewer equal steps say too little of their median: it follows them, and the spread looks smaller
than it is (by a sixth at 5 steps, by a tenth at 10)."""


@dataclass(frozen=True, slots=True)
class IdenticalSpread:
    """Steps with equal loads, against the median of their group.

    `mean_ape` is the mean of |median - measured| / measured, a share: the error of a model that
    knew each group's median, and so an error that no model of the load gets under for long.
    0 without such steps.
    """

    mean_ape: float
    num_steps: int
    num_groups: int


def identical_spread(observations: Sequence[Observation]) -> IdenticalSpread:
    """The spread within groups of at least LEAST_IDENTICAL steps whose totals are all equal."""
    groups: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for load, step_s in observations:
        groups[load_row(load)].append(step_s)
    alike = [np.array(group) for group in groups.values() if len(group) >= LEAST_IDENTICAL]
    errors = [abs(np.median(group) - group) / group for group in alike]
    if not errors:
        return IdenticalSpread(0.0, 0, 0)
    joined = np.concatenate(errors)
    return IdenticalSpread(float(joined.mean()), len(joined), len(alike))


FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class OnlineLatency:
    """What online calls saw while the engine had nothing else to do. Percentiles over the calls."""

    num_calls: int
    calls_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


@dataclass(frozen=True, slots=True)
class CalibrationProfile:
    """Fitted step-time models of one engine, the best first."""

    engine: EngineIdentity
    kv_blocks: int
    """Of the engine that was measured. Step times do not depend on it."""
    fitted: tuple[FittedModel, ...]
    spread: IdenticalSpread
    pivot_tokens: int
    """Tokens per step at which throughput saturates."""
    online: OnlineLatency | None
    """None when the engine could not answer chat calls."""
    measured_at: float
    """UTC epoch seconds."""
    gap: StepGap | None = None
    """Between two steps; None where steps are scheduled ahead, and in profiles from before."""

    @property
    def models(self) -> tuple[AnyModel, ...]:
        """The models alone, the best first: what `OnlineFit` starts from."""
        return tuple(each.model for each in self.fitted)

    def mismatch(self, engine: EngineIdentity) -> str | None:
        """One line that names what differs from `engine`; None when the profile holds for it."""
        differing = [
            f"{each.name} {getattr(self.engine, each.name)!r} (here {getattr(engine, each.name)!r})"
            for each in fields(EngineIdentity)
            if getattr(self.engine, each.name) != getattr(engine, each.name)
        ]
        return f"measured with another {', '.join(differing)}" if differing else None

    def to_json(self) -> str:
        """The file's content; `profile_from_json` gives an equal profile back."""
        record = {
            "version": FORMAT_VERSION,
            "engine": asdict(self.engine),
            "kv_blocks": self.kv_blocks,
            "fitted": [_fitted_record(each) for each in self.fitted],
            "spread": asdict(self.spread),
            "pivot_tokens": self.pivot_tokens,
            "online": None if self.online is None else asdict(self.online),
            "measured_at": self.measured_at,
            "gap": None if self.gap is None else asdict(self.gap),
        }
        return json.dumps(record, indent=2) + "\n"


def profile_from_json(text: str, source: str) -> CalibrationProfile:
    """Read a profile; `source` names it in errors. Raises ConfigError, one line, strict."""
    try:
        return _profile(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: not JSON (line {error.lineno}: {error.msg})") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}; run `batchrun calibrate` again") from error


def _profile(value: object) -> CalibrationProfile:
    if isinstance(value, dict):
        value = {"gap": None, **value}
    record = _object(value, "profile", ("version", *_keys(CalibrationProfile)))
    if record["version"] != FORMAT_VERSION:
        raise ConfigError(f"profile version {record['version']!r}, expected {FORMAT_VERSION}")
    fitted = record["fitted"]
    if not isinstance(fitted, list) or not fitted:
        raise ConfigError("fitted must be a list of at least one model")
    models = tuple(_fitted(each) for each in fitted)
    if len({each.model.name for each in models}) != len(models):
        raise ConfigError("fitted names a model twice")
    return CalibrationProfile(
        _engine(record["engine"]),
        _count(record, "kv_blocks"),
        models,
        _spread(record["spread"]),
        _count(record, "pivot_tokens"),
        None if record["online"] is None else _online(record["online"]),
        _number(record, "measured_at"),
        None if record["gap"] is None else _gap(record["gap"]),
    )


def _engine(value: object) -> EngineIdentity:
    record = _object(value, "engine", _keys(EngineIdentity))
    return EngineIdentity(
        _text(record, "model"),
        _text(record, "vllm_version"),
        _text(record, "device"),
        _text(record, "dtype"),
        _count(record, "block_tokens"),
    )


def _spread(value: object) -> IdenticalSpread:
    record = _object(value, "spread", _keys(IdenticalSpread))
    return IdenticalSpread(
        _number(record, "mean_ape"),
        _count(record, "num_steps", least=0),
        _count(record, "num_groups", least=0),
    )


def _online(value: object) -> OnlineLatency:
    names = _keys(OnlineLatency)
    record = _object(value, "online", names)
    return OnlineLatency(
        _count(record, "num_calls"), *[_number(record, name) for name in names[1:]]
    )


def _gap(value: object) -> StepGap:
    record = _object(value, "gap", _keys(StepGap))
    return StepGap(_number(record, "base_s"), _number(record, "request_s"))


def _fitted_record(fitted: FittedModel) -> dict[str, object]:
    return {**asdict(fitted), "model": model_to_record(fitted.model)}


def _fitted(value: object) -> FittedModel:
    record = _object(value, "fitted", _keys(FittedModel))
    return FittedModel(
        model_from_record(record["model"]),
        _number(record, "held_out_mape"),
        _number(record, "held_out_p95_ape"),
        _count(record, "num_held_out"),
    )


def _object(value: object, name: str, keys: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict) or set(value) != set(keys):
        raise ConfigError(f"{name}: expected an object with the keys {', '.join(keys)}")
    return value


def _keys(of: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(of))


def _text(record: dict[str, object], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key} must be a text that is not empty")
    return value


def _count(record: dict[str, object], key: str, *, least: int = 1) -> int:
    value = record[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} must be a whole number of at least {least}")
    return value


def _number(record: dict[str, object], key: str) -> float:
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{key} must be a number of at least 0")
    return float(value)


@dataclass(frozen=True, slots=True)
class Recording:
    """What an engine recorded of itself. Loads hold totals only: nothing can be removed again."""

    facts: EngineFacts
    observations: Sequence[Observation]
    gaps: Sequence[ObservedGap] = ()
    """Between two steps; none where steps are scheduled ahead."""

    def after(self, earlier: Recording) -> Recording:
        """Without what `earlier`, a shorter reading of the same record, has."""
        return Recording(
            self.facts,
            self.observations[len(earlier.observations) :],
            self.gaps[len(earlier.gaps) :],
        )


def facts_line(facts: EngineFacts) -> str:
    """The first line."""
    return json.dumps(asdict(facts)) + "\n"


def step_line(load: StepLoad, step_s: float, gap: ObservedGap | None = None) -> str:
    """One step, and the gap before it where there was one. 3 us."""
    num_before, gap_s = gap or ("null", "null")
    return (
        f"[{load.num_requests},{load.num_tokens},{load.context_tokens},{load.attention_pairs},"
        f"{load.num_decodes},{load.decode_context_tokens},{load.max_decode_context_tokens},"
        f"{step_s},{num_before},{gap_s}]\n"
    )


def read_recording(text: str) -> Recording:
    """Read what an engine has recorded so far. Raises EngineError when that is something else."""
    first, *lines = text.splitlines() or [""]
    try:
        record = json.loads(first)
        facts = EngineFacts(engine=EngineIdentity(**record.pop("engine")), **record)
        observations: list[Observation] = []
        gaps: list[ObservedGap] = []
        for line in lines:
            *totals, step_s, num_before, gap_s = json.loads(line)
            if gap_s is not None:
                gaps.append((num_before, gap_s))
            if step_s > 0.0:
                observations.append((StepLoad(*totals), step_s))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"the engine's record of its steps cannot be read: {error}") from error
    return Recording(facts, observations, gaps)


def calibrate(
    recording: Recording, *, measured_at: float, online: OnlineLatency | None = None
) -> CalibrationProfile:
    """Fit all models to the recorded steps and find the pivot size by the best of them.

    `measured_at` is UTC epoch seconds. Raises EngineError when too few steps were recorded.
    """
    facts, observations = recording.facts, recording.observations
    if len(observations) < LEAST_OBSERVATIONS:
        raise EngineError(
            f"the engine computed only {len(observations)} steps in the time of a calibration"
        )
    fitted = fit_all(observations)
    return CalibrationProfile(
        engine=facts.engine,
        kv_blocks=facts.kv_blocks,
        fitted=tuple(fitted),
        spread=identical_spread(observations),
        pivot_tokens=pivot_tokens(fitted[0].model, facts.token_budget),
        online=online,
        measured_at=measured_at,
        gap=fit_gap(recording.gaps),
    )
