"""The step-time models kept current while the engine runs: one observation per step.

Each step is predicted by every model before it learns from it, which tells which one to trust.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batchrun.estimator.fits import (
    LEAST_MIX,
    START_QUANTILES,
    START_SHARES,
    best_of,
    fit_echo,
    fit_linear,
    polish_echo_base,
    polish_roofline,
    shortest_s,
    split_by_size,
    with_base,
)
from batchrun.estimator.step_load import NUM_KINDS, StepLoad, StepMemory, StepTable
from batchrun.estimator.step_time import (
    MODELS,
    AnyModel,
    EchoBaseModel,
    EchoModel,
    LinearModel,
    RooflineModel,
    StepTimeModel,
)

WORST_APE = 2.0
"""A prediction of three times the measured time; larger errors count as this one."""
WORST_LOG_ERROR = 2.0
"""Seven times too long or too short; larger errors count as this one."""

KIND_WINDOW_STEPS = 64
"""Few, so that what a model got wrong while it was new is soon forgotten in rare kinds too."""


class HeldOutErrors:
    """One model's errors: over the latest steps, and over the latest of each kind of step.

    The latter for the choice between models: an hour of decodes says nothing about prefills. They
    are logarithms of the ratio, as a percentage error forgives what is predicted far too short.
    """

    __slots__ = ("_by_kind", "_latest")

    def __init__(self, num_kinds: int, window_steps: int) -> None:
        """`window_steps` latest steps are kept, and KIND_WINDOW_STEPS of each kind."""
        self._latest = _Window(window_steps)
        self._by_kind = tuple(_Window(KIND_WINDOW_STEPS) for _ in range(num_kinds))

    @property
    def num_steps(self) -> int:
        """Steps among the latest."""
        return len(self._latest.errors)

    @property
    def mape(self) -> float:
        """The mean over the latest steps as they came; 0 before the first. O(1)."""
        return self._latest.total / max(1, len(self._latest.errors))

    def add(self, kind: int, predicted_s: float, measured_s: float) -> None:
        """Count a step predicted before it was measured; `measured_s` is positive. 0.8 us."""
        error = min(abs(predicted_s - measured_s) / measured_s, WORST_APE)
        self._latest.add(error)
        ratio = max(predicted_s, 1e-9) / measured_s
        self._by_kind[kind].add(min(abs(math.log(ratio)), WORST_LOG_ERROR))

    def balanced_log_error(self) -> float:
        """The mean over the latest steps of each kind; 0 before the first step.

        So kinds count alike once KIND_WINDOW_STEPS of each were seen, and less before.
        """
        num_steps = sum(len(window.errors) for window in self._by_kind)
        return sum(window.total for window in self._by_kind) / num_steps if num_steps else 0.0


class _Window:
    """The latest errors and their sum."""

    __slots__ = ("errors", "total")

    def __init__(self, window_steps: int) -> None:
        self.total = 0.0
        self.errors: deque[float] = deque(maxlen=window_steps)

    def add(self, error: float) -> None:
        is_full = len(self.errors) == self.errors.maxlen
        self.total += error - self.errors[0] if is_full else error
        self.errors.append(error)


COLD_START = LinearModel(
    base_s=5e-3, token_s=1e-4, pair_s=5e-9, decode_context_s=1e-7, request_s=2e-5
)
"""Believed of an engine that was never calibrated: about 10,000 tokens/s, on the slow side."""

_EAGER_STEPS = 256
_EAGER_STEPS_OF_A_KIND = 64
_EAGER_INTERVAL_STEPS = 8
_ROUNDS = 2
_SHARE_STEPS = (0.08, 0.03, 0.01)
_COLD_WEIGHT = 0.01
_CALIBRATED_WEIGHT = 0.1
_LEAST_HELD_OUT = 32
_CLEARLY_BETTER = 0.95


SLOW_MEMORY_STEPS = 16
"""How fast what steps took more than predicted is believed, and forgotten."""
UNSEEN_MEMORY_STEPS = 256
"""The same for a kind of step while only others come: the first steps of an engine are slow."""
FORGIVEN_SHARE = 0.15
"""Steps that take little more are noise, or the next refit's."""
MOST_SLOW = 4.0


class ScaledModel(Struct, frozen=True):
    """A model whose predictions are so many times too short, by kind of step."""

    name: ClassVar[str] = "scaled"

    model: StepTimeModel
    times: tuple[float, ...]

    def predict_s(self, load: StepLoad) -> float:
        """Seconds."""
        return self.model.predict_s(load) * self.times[load.kind]


class _Excess:
    """How many times as long as predicted the latest steps of one kind took, 1 at least."""

    __slots__ = ("_latest", "_measured_s", "_predicted_s", "times")

    def __init__(self) -> None:
        self._latest: StepLoad | None = None
        self._measured_s = self._predicted_s = 0.0
        self.times = 1.0

    def add(self, load: StepLoad, predicted_s: float, measured_s: float) -> None:
        """A step has ended. Of the first ones less is believed."""
        self._latest = load.totals()
        if not self._predicted_s:
            self._measured_s = self._predicted_s = SLOW_MEMORY_STEPS / 4 * predicted_s
        kept = 1 - 1 / SLOW_MEMORY_STEPS
        self._measured_s = kept * self._measured_s + min(measured_s, MOST_SLOW * predicted_s)
        self._predicted_s = kept * self._predicted_s + predicted_s
        self._set()

    def fade(self) -> None:
        """A step of another kind has ended."""
        self._measured_s += (self._predicted_s - self._measured_s) / UNSEEN_MEMORY_STEPS
        self._set()

    def follow(self, before: StepTimeModel, now: StepTimeModel) -> None:
        """Another model predicts from `now` on: where it says more of the latest step, it accounts
        for so much of what steps took beyond the last one's."""
        before_s = before.predict_s(self._latest) if self._latest else 0.0
        if self._latest and before_s:
            self._predicted_s *= max(1.0, now.predict_s(self._latest) / before_s)
            self._set()

    def _set(self) -> None:
        if self._predicted_s:
            self.times = max(1.0, self._measured_s / self._predicted_s - FORGIVEN_SHARE)


class OnlineFit:
    """Refines every model and says which one predicts best.

    Each observed step is first predicted by every model as it stands, which gives the held-out
    errors, then remembered (`StepMemory`: decay, and old beliefs per kind of step). Every
    `refit_every_steps` one of the models, in turn, is refitted to what is remembered: robust, on
    relative errors, from its last coefficients (`least_squares`); in the first 256 steps, and the
    first 64 of each kind, every 8.

    Measured on one core with 1,000 steps remembered: 20 us per step amortised; a step without a
    refit takes 9 us, one with it 1.1 ms (at worst 2.5).
    """

    def __init__(
        self,
        calibrated: Sequence[AnyModel] = (),
        *,
        refit_every_steps: int = 128,
        half_life_steps: float = 4_000,
        error_window_steps: int = 512,
    ) -> None:
        """`calibrated` holds at most one model of each name, the best first; none: COLD_START."""
        believed = calibrated[0] if calibrated else COLD_START
        known = {model.name: model for model in calibrated}
        self._current: dict[str, AnyModel] = {name: known.get(name, believed) for name in MODELS}
        self._error_window_steps = error_window_steps
        self._errors = {
            name: HeldOutErrors(NUM_KINDS, error_window_steps) for name in self._current
        }
        self._excesses = [_Excess() for _ in range(NUM_KINDS)]
        self._num_of_kind = [0] * NUM_KINDS
        self._best = believed
        self._best_name = believed.name
        self._refit_every_steps = refit_every_steps
        self._num_refits = 0
        self._memory = StepMemory(half_life_steps)
        weight = _CALIBRATED_WEIGHT if calibrated else _COLD_WEIGHT
        for load in _typical_loads():
            self._memory.add_prior(load, believed.predict_s(load), weight)

    @property
    def models(self) -> dict[str, AnyModel]:
        """The models by name as they stand; a name not fitted yet holds what is believed."""
        return dict(self._current)

    def best(self) -> AnyModel:
        """The model with the smallest held-out error; what is believed until that is known.

        The latest 64 steps of each kind (prefill, decode, both) count alike in the choice.
        """
        return self._best

    def as_of_late(self) -> AnyModel | ScaledModel:
        """The best model, slower where steps of late were: a machine that others use more now, or
        a kind of step that it has not seen before."""
        times = tuple([excess.times for excess in self._excesses])
        return ScaledModel(self._best, times) if max(times) > 1.0 else self._best

    @property
    def error_share(self) -> float:
        """The mean absolute percentage error (0.1: 10 %) of the best model's latest predictions."""
        return self._errors[self._best_name].mape

    def observe(self, load: StepLoad, step_s: float) -> None:
        """Learn that a step with this load took `step_s`; ignored unless both are positive.

        The caller leaves out intervals in which the engine was idle. Keeps no reference to `load`.
        """
        if step_s <= 0.0 or not load.num_requests:
            return
        kind = load.kind
        before = self._best
        for each, excess in enumerate(self._excesses):
            if each == kind:
                excess.add(load, before.predict_s(load), step_s)
            elif excess.times > 1.0:
                excess.fade()
        self._num_of_kind[kind] += 1
        for name, model in self._current.items():
            self._errors[name].add(kind, model.predict_s(load), step_s)
        self._memory.add(load, step_s)
        num_seen = self._memory.num_seen
        is_early = num_seen <= _EAGER_STEPS
        is_eager = is_early or self._num_of_kind[kind] <= _EAGER_STEPS_OF_A_KIND
        interval = _EAGER_INTERVAL_STEPS if is_eager else self._refit_every_steps
        if num_seen % interval == 0:
            self._refit_next()
        if num_seen % interval == 0 or is_early:
            self._choose()
        if self._best is not before:
            for excess in self._excesses:
                excess.follow(before, self._best)

    def _refit_next(self) -> None:
        names = tuple(self._current)
        name = names[self._num_refits % len(names)]
        if self._current[name].name != name:
            # The errors so far are those of what was believed in its place.
            self._errors[name] = HeldOutErrors(NUM_KINDS, self._error_window_steps)
        self._current[name] = self._refitted(name, self._memory.table())
        self._num_refits += 1

    def _choose(self) -> None:
        """Change over to another model only when it is clearly better: errors are noisy."""
        found = {
            name: errors.balanced_log_error()
            for name, errors in self._errors.items()
            if errors.num_steps >= _LEAST_HELD_OUT
        }
        if self._best_name in found:
            lowest = min(found, key=found.__getitem__)
            if found[lowest] < _CLEARLY_BETTER * found[self._best_name]:
                self._best_name = lowest
        self._best = self._current[self._best_name]

    def _refitted(self, name: str, table: StepTable) -> AnyModel:
        known, turn = self._current[name], self._num_refits // len(self._current)
        if name == LinearModel.name:
            return fit_linear(table, known if isinstance(known, LinearModel) else None, _ROUNDS)
        if name == EchoModel.name:
            return fit_echo(table, known if isinstance(known, EchoModel) else None, _ROUNDS)
        if name == EchoBaseModel.name:
            base = known if isinstance(known, EchoBaseModel) else None
            return _refitted_echo_base(table, base, self._current[EchoModel.name], turn)
        roofline = known if isinstance(known, RooflineModel) else None
        return _refitted_roofline(table, roofline, turn)


def _refitted_echo_base(
    table: StepTable, current: EchoBaseModel | None, echo: AnyModel, turn: int
) -> EchoBaseModel:
    """The better of the current model, improved, and one other in turn: see `_refitted_roofline`.

    A fresh start is Echo's model as it stands, which is refitted just before, with a base.
    """
    if current and turn % 3 < 2:
        other = replace(current, mix=_changed(current.mix, turn, LEAST_MIX))
    else:
        assert isinstance(echo, EchoModel)
        other = with_base(echo, START_SHARES[turn // 3 % len(START_SHARES)] * shortest_s(table))
    candidates = [other, current] if current else [other]
    return best_of(polish_echo_base(table, each, _ROUNDS) for each in candidates)[1]


def _refitted_roofline(table: StepTable, current: RooflineModel | None, turn: int) -> RooflineModel:
    """The better of the current model, improved, and one other in turn.

    The other is a neighbour in the share that the least squares do not fit or, each third time, a
    fresh start: a wrong branch is left behind in time, without ever paying for a full search.
    """
    if current and turn % 3 < 2:
        other = replace(current, unhidden=_changed(current.unhidden, turn))
    else:
        at = START_QUANTILES[turn % len(START_QUANTILES)]
        other = split_by_size(table, float(np.quantile(table.tokens, at)), turn * 3 % 11 / 10)
    candidates = [other, current] if current else [other]
    return best_of(polish_roofline(table, each, _ROUNDS) for each in candidates)[1]


def _changed(share: float, turn: int, least: float = 0.0) -> float:
    """A neighbouring share: up and down in turn, by less and less far."""
    change = _SHARE_STEPS[turn // 3 % len(_SHARE_STEPS)]
    return min(1.0, max(least, share + (change if turn % 3 else -change)))


def _typical_loads() -> Iterator[StepLoad]:
    """Steps of every kind and size for which the memory starts with a belief."""
    prefills = [(new, new + cached) for new in (16, 128, 512, 2048) for cached in (0, 1024, 16384)]
    decodes = [(size, context) for size in (1, 8, 64, 256) for context in (128, 1024, 8192)]
    for new, context in prefills:
        yield StepLoad.of([(new, context, False)])
    for size, context in decodes:
        yield StepLoad.of([(1, context, True)] * size)
        for new, prefill_context in prefills[::4]:
            yield StepLoad.of([(1, context, True)] * size + [(new, prefill_context, False)])
