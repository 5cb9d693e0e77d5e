"""What an engine's steps cost, out of its step-time model; and what rows take of a usual one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.radix_tree import FloatArray, PrefixOrder
from batchrun.pool.row_queue import PlannedWork
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


USUAL = Prices()
FULL_BATCH = 256
"""Rows that share the constant part of a step."""


class RowTokens(NamedTuple):
    """Tokens of each row: of its prompt, of these cached, and of its answer."""

    prompt: FloatArray
    cached: FloatArray
    output: FloatArray


def work_of(prices: Prices, rows: RowTokens) -> FloatArray:
    """Seconds that each row takes of an engine that is full."""
    prompt, cached, output = rows
    missed = prompt - cached
    prefill_s = missed * (prices.token_s + prices.pair_s * (cached + 0.5 * missed))
    return prefill_s + output * (prices.base_s / FULL_BATCH + prompt * prices.context_token_s)


def planned_work(order: PrefixOrder, group_of: IntArray, rows: RowTokens) -> PlannedWork:
    """The work of a job's rows in planned order, from their groups, and their tokens if each finds
    what it shares with the one before."""
    prompt, cached, output = (tokens[order.rows] for tokens in rows)
    none = np.zeros(len(prompt))
    work_s = work_of(USUAL, RowTokens(prompt, cached, output))
    return PlannedWork(group_of[order.rows], work_s, work_of(USUAL, RowTokens(cached, none, none)))


def speed_of(prices: Prices) -> float:
    """How many times as fast as a usual engine one is, by a typical row."""
    row = RowTokens(np.array([4_096.0]), np.array([2_048.0]), np.array([64.0]))
    return float(work_of(USUAL, row)[0] / max(work_of(prices, row)[0], 1e-9))
