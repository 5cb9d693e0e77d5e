"""Sizes of prefill chunks: the largest that fits a time, and where throughput saturates."""

from __future__ import annotations

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel

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
    trial = load.copy()
    trial.add(0, computed_tokens)
    num_tokens, context_tokens, pairs = (
        trial.num_tokens,
        trial.context_tokens,
        trial.attention_pairs,
    )

    def fits(chunk_tokens: int) -> bool:
        trial.num_tokens = num_tokens + chunk_tokens
        trial.context_tokens = context_tokens + chunk_tokens
        trial.attention_pairs = pairs + chunk_tokens * (computed_tokens + 0.5 * chunk_tokens)
        return model.predict_s(trial) <= limit_s

    if most_tokens <= 0 or not fits(1):
        return 0
    if fits(most_tokens):
        return most_tokens
    fitting, too_long = 1, most_tokens
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if fits(middle):
            fitting = middle
        else:
            too_long = middle
    return fitting


def pivot_tokens(model: StepTimeModel, most_tokens: int, saturation: float = SATURATION) -> int:
    """The fewest tokens of a fresh prefill whose tokens/s reach `saturation` of the best.

    Compares steps of 1, 2, 4 ... and `most_tokens` tokens without cached context, then narrows
    down between the two sizes around the crossing. `most_tokens` must be positive.
    """
    sizes = sorted({*(1 << bit for bit in range(most_tokens.bit_length())), most_tokens})
    wanted = saturation * max(_tokens_per_s(model, size) for size in sizes)
    reaching = next(i for i, size in enumerate(sizes) if _tokens_per_s(model, size) >= wanted)
    if reaching == 0:
        return sizes[0]
    below, enough = sizes[reaching - 1], sizes[reaching]
    while enough - below > 1:
        middle = (below + enough) // 2
        if _tokens_per_s(model, middle) >= wanted:
            enough = middle
        else:
            below = middle
    return enough


def _tokens_per_s(model: StepTimeModel, new_tokens: int) -> float:
    return new_tokens / max(model.predict_s(StepLoad.of([(new_tokens, new_tokens, False)])), 1e-12)
