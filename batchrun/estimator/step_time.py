"""How long a step takes: models of the same `StepLoad`.

All coefficients are non-negative, so a longer chunk never has a shorter prediction. A step
without requests does not run: every model predicts 0 for it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Protocol

from batchrun.errors import ConfigError
from batchrun.estimator.step_load import StepLoad


class StepTimeModel(Protocol):
    """Predicts a step's duration; never changes once made."""

    name: ClassVar[str]

    def predict_s(self, load: StepLoad) -> float:
        """Seconds that the engine needs for a step with this load."""
        ...


@dataclass(frozen=True, slots=True)
class EchoModel:
    """The model of Echo, section 5.2, equations 6 to 8.

    Eq. 6 is printed for one prompt of l tokens computed at once, max(alpha l^2 + beta l, c).
    Chunks with cached context make l^2 the sum over prefills of context^2 - computed^2, which is
    twice `StepLoad.prefill_pairs`: it is l^2 for a whole prompt and adds up to l^2 over its
    chunks; l is the sum of new tokens, and c is paid once a step. Eq. 7 pools the decodes'
    contexts and has neither a constant nor a batch size. Eq. 8 is printed as a weighted mean of
    both, so it lies between the two, although the text beside it says above the larger;
    `mix` is its lambda, 0 to 1, as the equation needs it to grow with both.
    """

    name: ClassVar[str] = "echo"

    prefill_square_s: float
    """alpha, seconds per token^2."""
    prefill_token_s: float
    """beta, seconds per token."""
    prefill_floor_s: float
    """c, seconds."""
    decode_max_s: float
    """gamma, seconds per token of the longest decode context."""
    decode_mean_s: float
    """delta, seconds per token of the mean decode context."""
    mix: float
    """lambda, the weight of the larger of both times."""

    def predict_s(self, load: StepLoad) -> float:
        """Seconds: Eq. 6 without decodes, Eq. 7 without prefills, else Eq. 8."""
        num_decodes = load.num_decodes
        if load.num_requests == num_decodes:
            return self._decode_s(load) if num_decodes else 0.0
        # `load.prefill_pairs` and `load.prefill_tokens` written out: two property calls less.
        prefill_pairs = load.attention_pairs - load.decode_context_tokens + 0.5 * num_decodes
        prefill_s = 2.0 * self.prefill_square_s * prefill_pairs + self.prefill_token_s * (
            load.num_tokens - num_decodes
        )
        if prefill_s < self.prefill_floor_s:
            prefill_s = self.prefill_floor_s
        if not num_decodes:
            return prefill_s
        decode_s = self._decode_s(load)
        if prefill_s > decode_s:
            return self.mix * prefill_s + (1.0 - self.mix) * decode_s
        return self.mix * decode_s + (1.0 - self.mix) * prefill_s

    def _decode_s(self, load: StepLoad) -> float:
        mean_tokens = load.decode_context_tokens / load.num_decodes
        return self.decode_max_s * load.max_decode_context_tokens + self.decode_mean_s * mean_tokens


@dataclass(frozen=True, slots=True)
class EchoBaseModel(EchoModel):
    """Echo's model plus what every step costs, however small: base + Eq. 8.

    Eq. 7 has no constant, so it lets a decode of short contexts take no time at all.
    """

    name: ClassVar[str] = "echo-base"

    base_s: float

    def predict_s(self, load: StepLoad) -> float:
        """Seconds."""
        # No super(): a dataclass with slots is made anew, and the call would look for the old one.
        return self.base_s + EchoModel.predict_s(self, load) if load.num_requests else 0.0


@dataclass(frozen=True, slots=True)
class LinearModel:
    """Linear in 1, tokens, attention pairs, decode contexts and requests."""

    name: ClassVar[str] = "linear"

    base_s: float
    token_s: float
    pair_s: float
    decode_context_s: float
    request_s: float

    def predict_s(self, load: StepLoad) -> float:
        """Seconds."""
        if not load.num_requests:
            return 0.0
        return (
            self.base_s
            + self.token_s * load.num_tokens
            + self.pair_s * load.attention_pairs
            + self.decode_context_s * load.decode_context_tokens
            + self.request_s * load.num_requests
        )


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """Compute and memory time overlap in part: base + max(c, m) + unhidden * min(c, m).

    c = token_s * tokens + pair_s * attention pairs; m = weights_s + context_s * contexts read.
    """

    name: ClassVar[str] = "roofline"

    base_s: float
    token_s: float
    pair_s: float
    weights_s: float
    context_s: float
    unhidden: float
    """Share of the smaller of both times that the larger does not hide, 0 to 1."""

    def predict_s(self, load: StepLoad) -> float:
        """Seconds."""
        if not load.num_requests:
            return 0.0
        compute_s = self.token_s * load.num_tokens + self.pair_s * load.attention_pairs
        memory_s = self.weights_s + self.context_s * load.context_tokens
        if compute_s > memory_s:
            return self.base_s + compute_s + self.unhidden * memory_s
        return self.base_s + memory_s + self.unhidden * compute_s


AnyModel = EchoModel | EchoBaseModel | LinearModel | RooflineModel
MODELS: dict[str, type[AnyModel]] = {
    EchoModel.name: EchoModel,
    EchoBaseModel.name: EchoBaseModel,
    LinearModel.name: LinearModel,
    RooflineModel.name: RooflineModel,
}
_SHARES = frozenset({"mix", "unhidden"})


def model_to_record(model: AnyModel) -> dict[str, object]:
    """The model as a JSON object; `model_from_record` gives an equal model back."""
    return {"model": model.name, **asdict(model)}


def model_from_record(record: object) -> AnyModel:
    """Read what `model_to_record` made. Raises ConfigError naming what is wrong."""
    name = record.get("model") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(name, str) or name not in MODELS:
        raise ConfigError(f"step-time model: expected an object whose model is one of {[*MODELS]}")
    names = [each.name for each in fields(MODELS[name])]
    if set(record) != {"model", *names}:
        raise ConfigError(f"step-time model {name}: expected the keys {names}")
    return MODELS[name](*[_coefficient(name, key, record[key]) for key in names])


def _coefficient(model: str, key: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"step-time model {model}: {key} must be a number of at least 0")
    if key in _SHARES and float(value) > 1:  # type: ignore[arg-type]
        raise ConfigError(f"step-time model {model}: {key} must be at most 1")
    return float(value)  # type: ignore[arg-type]
