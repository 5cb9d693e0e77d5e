"""What a router is told of an engine's speed: prices out of its step-time model."""

from __future__ import annotations

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.routing.engine_book import Prices

_CHUNK, _LONG, _SHORT, _BATCH = 1024, 16_384, 16, 64


def prices_of(model: StepTimeModel) -> Prices:
    """The prices whose sums come near the model's steps: differences between typical steps."""

    def prefill_s(tokens: int, context: int) -> float:
        return model.predict_s(StepLoad.of([(tokens, context, False)]))

    def decode_s(num: int, context: int) -> float:
        return model.predict_s(StepLoad.of([(1, context, True)] * num))

    pair_s = (prefill_s(_CHUNK, _LONG) - prefill_s(_CHUNK, _CHUNK)) / (_CHUNK * (_LONG - _CHUNK))
    twice_s = prefill_s(2 * _CHUNK, 2 * _CHUNK) - prefill_s(_CHUNK, _CHUNK)
    base_s = decode_s(1, _SHORT)
    batch_s = decode_s(_BATCH, _SHORT)
    return Prices(
        base_s=base_s,
        token_s=max(0.0, twice_s / _CHUNK - 1.5 * _CHUNK * pair_s),
        pair_s=max(0.0, pair_s),
        call_s=max(0.0, (batch_s - base_s) / (_BATCH - 1)),
        context_token_s=max(
            0.0, (decode_s(_BATCH, 2 * _CHUNK) - batch_s) / (_BATCH * (2 * _CHUNK - _SHORT))
        ),
    )
