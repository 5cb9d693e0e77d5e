"""What `batchrun calibrate` learned about one engine, as a JSON file.

An engine records facts about itself and a line for each step; from these follow the models of step
times. The caller reads and writes the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

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
from batchrun.estimator.step_time import AnyModel, pivot_tokens

Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Number = Annotated[float, Meta(ge=0)]


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    """An object in a file; what it may hold is checked when it is read."""


class EngineIdentity(_Record, frozen=True):
    """What a profile holds for: any other value makes the fitted times wrong."""

    model: Text
    vllm_version: Text
    device: Text
    dtype: Text
    block_tokens: Count


class EngineFacts(_Record, frozen=True):
    """An engine's identity and its limits: of the KV cache, of one request, of one step."""

    engine: EngineIdentity
    kv_blocks: Count
    longest_tokens: Count
    """Prompt and output of one request."""
    token_budget: Count
    """New tokens in one step."""
    max_running: Count
    """Requests in one step."""
    vocabulary: Count
    """Token ids run from 0 to this number, exclusive."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv_blocks * self.engine.block_tokens


LEAST_IDENTICAL = 5
"""Fewer equal steps say too little of their median: it follows them, and the spread looks smaller
than it is (by a sixth at 5 steps, by a tenth at 10)."""


class IdenticalSpread(_Record, frozen=True):
    """Steps with equal loads, against the median of their group.

    `mean_ape` is the mean of |median - measured| / measured, a share: the error of a model that
    knew each group's median, and so an error that no model of the load gets under for long.
    0 without such steps.
    """

    mean_ape: Number
    num_steps: Annotated[int, Meta(ge=0)]
    num_groups: Annotated[int, Meta(ge=0)]


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


class OnlineLatency(_Record, frozen=True):
    """What online calls saw while the engine had nothing else to do. Percentiles over the calls."""

    num_calls: Count
    calls_per_s: Number
    ttft_p50_s: Number
    ttft_p99_s: Number
    tpot_p50_s: Number
    tpot_p99_s: Number
    outside_s: Number | None = None
    """Of a first token's time what passes outside the engine's steps, at the median: HTTP, the chat
    template, the tokenizer. None where it was not measured."""


_SOME_STEP = StepLoad.of([(16, 16, False), (1, 17, True)])


class CalibrationProfile(_Record, frozen=True, tag_field="version", tag=FORMAT_VERSION):
    """Fitted step-time models of one engine, the best first."""

    engine: EngineIdentity
    kv_blocks: Count
    """Of the engine that was measured. Step times do not depend on it."""
    fitted: Annotated[tuple[FittedModel, ...], Meta(min_length=1)]
    spread: IdenticalSpread
    pivot_tokens: Count
    """Tokens per step at which throughput saturates."""
    online: OnlineLatency | None
    """None when the engine could not answer chat calls."""
    measured_at: Number
    """UTC epoch seconds."""
    gap: StepGap | None = None
    """Between two steps; None where steps are scheduled ahead, and in profiles from before."""
    token_budget: Count | None = None
    max_running: Count | None = None
    """Limits of a step of the engine that was measured; None in profiles from before."""

    def __post_init__(self) -> None:
        if len({model.name for model in self.models}) != len(self.fitted):
            raise ValueError("fitted names a model twice")
        for model in self.models:
            if model.predict_s(_SOME_STEP) == 0.0:
                raise ValueError(f"by its model {model.name} every step takes 0 s")

    @property
    def models(self) -> tuple[AnyModel, ...]:
        """The models alone, the best first: what `OnlineFit` starts from."""
        return tuple(each.model for each in self.fitted)

    def mismatch(self, engine: EngineIdentity) -> str | None:
        """One line that names what differs from `engine`; None when the profile holds for it."""
        differing = [
            f"{name} {getattr(self.engine, name)!r} (here {getattr(engine, name)!r})"
            for name in EngineIdentity.__struct_fields__
            if getattr(self.engine, name) != getattr(engine, name)
        ]
        return f"measured with another {', '.join(differing)}" if differing else None

    def to_json(self) -> str:
        """The file's content; `profile_from_json` gives an equal profile back."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def profile_from_json(text: str, source: str) -> CalibrationProfile:
    """Read a profile; `source` names it in errors. Raises ConfigError, one line, strict."""
    try:
        return msgspec.json.decode(text, type=CalibrationProfile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}; run `batchrun calibrate` again") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: not JSON ({error})") from error


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
    return msgspec.json.encode(facts).decode() + "\n"


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
        facts = msgspec.json.decode(first, type=EngineFacts)
        observations: list[Observation] = []
        gaps: list[ObservedGap] = []
        for line in lines:
            *totals, step_s, num_before, gap_s = msgspec.json.decode(line)
            if gap_s is not None:
                gaps.append((num_before, gap_s))
            if step_s > 0.0:
                observations.append((StepLoad(*totals), step_s))
    except (ValueError, TypeError) as error:
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
        gap=fit_gap(recording.gaps, len(observations)),
        token_budget=facts.token_budget,
        max_running=facts.max_running,
    )
