"""How long a step takes: models of the same `StepLoad`, and the sizes of chunks that follow.

All coefficients are non-negative, so a longer chunk never has a shorter prediction. A step
without requests does not run: every model predicts 0 for it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated, ClassVar, Protocol

from msgspec import Meta, Struct

from batchrun.estimator.step_load import StepLoad

Coefficient = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class StepTimeModel(Protocol):
    """Predicts a step's duration; never changes once made."""

    name: ClassVar[str]

    def predict_s(self, load: StepLoad) -> float:
        """Seconds that the engine needs for a step with this load."""


class _Coefficients(Struct, frozen=True, forbid_unknown_fields=True, tag_field="model"):
    """A JSON object of the model's name and its coefficients."""


class EchoModel(_Coefficients, frozen=True, tag="echo"):
    """The model of Echo, section 5.2, equations 6 to 8.

    Eq. 6 is printed for one prompt of l tokens computed at once, max(alpha l^2 + beta l, c).
    Chunks with cached context make l^2 the sum over prefills of context^2 - computed^2, which is
    twice the prefills' attention pairs: it is l^2 for a whole prompt and adds up to l^2 over its
    chunks; l is the sum of new tokens, and c is paid once a step. Eq. 7 pools the decodes'
    contexts and has neither a constant nor a batch size. Eq. 8 is printed as a weighted mean of
    both, so it lies between the two, although the text beside it says above the larger;
    `mix` is its lambda, 0 to 1, as the equation needs it to grow with both.
    """

    name: ClassVar[str] = "echo"

    prefill_square_s: Coefficient
    """alpha, seconds per token^2."""
    prefill_token_s: Coefficient
    """beta, seconds per token."""
    prefill_floor_s: Coefficient
    """c, seconds."""
    decode_max_s: Coefficient
    """gamma, seconds per token of the longest decode context."""
    decode_mean_s: Coefficient
    """delta, seconds per token of the mean decode context."""
    mix: Share
    """lambda, the weight of the larger of both times."""

    def predict_s(self, load: StepLoad) -> float:
        """Seconds: Eq. 6 without decodes, Eq. 7 without prefills, else Eq. 8."""
        num_decodes = load.num_decodes
        if load.num_requests == num_decodes:
            return self._decode_s(load) if num_decodes else 0.0
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


class EchoBaseModel(EchoModel, frozen=True, tag="echo-base"):
    """Echo's model plus what every step costs, however small: base + Eq. 8.

    Eq. 7 has no constant, so it lets a decode of short contexts take no time at all.
    """

    name: ClassVar[str] = "echo-base"

    base_s: Coefficient

    def predict_s(self, load: StepLoad) -> float:
        """Seconds."""
        return self.base_s + super().predict_s(load) if load.num_requests else 0.0


class LinearModel(_Coefficients, frozen=True, tag="linear"):
    """Linear in 1, tokens, attention pairs, decode contexts and requests."""

    name: ClassVar[str] = "linear"

    base_s: Coefficient
    token_s: Coefficient
    pair_s: Coefficient
    decode_context_s: Coefficient
    request_s: Coefficient

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


class RooflineModel(_Coefficients, frozen=True, tag="roofline"):
    """Compute and memory time overlap in part: base + max(c, m) + unhidden * min(c, m).

    c = token_s * tokens + pair_s * attention pairs; m = weights_s + context_s * contexts read.
    """

    name: ClassVar[str] = "roofline"

    base_s: Coefficient
    token_s: Coefficient
    pair_s: Coefficient
    weights_s: Coefficient
    context_s: Coefficient
    unhidden: Share
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

SATURATION = 0.9


def largest_chunk(
    model: StepTimeModel, load: StepLoad, computed_tokens: int, limit_s: float, most_tokens: int
) -> int:
    """The most tokens of one more prefill with which the step stays within `limit_s`.

    `load` is the step so far and is left as it was; `computed_tokens` of the request are cached
    or computed already. At most `most_tokens`; 0 when not even one token fits.

    A bisection. It writes the totals of `StepLoad.add` itself: 7 to 11 us with 256 decodes and
    `most_tokens` 8,192 on one core, 13 to 22 with `add` and `remove`.
    """
    num_tokens, pairs = load.num_tokens, load.attention_pairs
    context_tokens = load.context_tokens + computed_tokens
    trial = load.totals()
    trial.num_requests += 1

    def exceeds(chunk_tokens: int) -> bool:
        trial.num_tokens = num_tokens + chunk_tokens
        trial.context_tokens = context_tokens + chunk_tokens
        trial.attention_pairs = pairs + chunk_tokens * (computed_tokens + 0.5 * chunk_tokens)
        return model.predict_s(trial) > limit_s

    if most_tokens <= 0 or exceeds(1):
        return 0
    if not exceeds(most_tokens):
        return most_tokens
    return bisect_left(range(most_tokens), True, 2, key=exceeds) - 1


def pivot_tokens(model: StepTimeModel, most_tokens: int, saturation: float = SATURATION) -> int:
    """The fewest tokens of a fresh prefill whose tokens/s reach `saturation` of the best.

    Compares steps of 1, 2, 4 ... and `most_tokens` tokens without cached context, then narrows
    down between the two sizes around the crossing. `most_tokens` must be positive.
    """
    sizes = sorted({*(1 << bit for bit in range(most_tokens.bit_length())), most_tokens})
    wanted = saturation * max(_tokens_per_s(model, size) for size in sizes)

    def reaches(size: int) -> bool:
        return _tokens_per_s(model, size) >= wanted

    first = next(i for i, size in enumerate(sizes) if reaches(size))
    if first == 0:
        return sizes[0]
    return bisect_left(range(sizes[first]), True, sizes[first - 1] + 1, key=reaches)


def _tokens_per_s(model: StepTimeModel, new_tokens: int) -> float:
    return new_tokens / max(model.predict_s(StepLoad.of([(new_tokens, new_tokens, False)])), 1e-12)
