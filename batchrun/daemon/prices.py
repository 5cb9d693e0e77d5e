"""What an engine's steps cost, out of its step-time model; what rows take of a usual one; and what
jobs have taken of engines so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from batchrun.config import Deployment
from batchrun.daemon.engine_link import EngineLink, Slot
from batchrun.daemon.plugin import existing_profile, read_profile
from batchrun.engine_config import EngineConfig
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import StepTimeModel
from batchrun.home import Home
from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.radix_tree import FloatArray, PrefixOrder
from batchrun.pool.row_queue import PlannedWork
from batchrun.routing.engine_book import Prices
from batchrun.store import jobs
from batchrun.store.database import Store

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


TokensT = TypeVar("TokensT", float, FloatArray)


def output_token_s(prices: Prices, prompt_tokens: TokensT) -> TokensT:
    """Seconds that a token of an answer to each prompt takes of an engine that is full."""
    return prices.base_s / FULL_BATCH + prompt_tokens * prices.context_token_s


def work_of(prices: Prices, rows: RowTokens) -> FloatArray:
    """Seconds that each row takes of an engine that is full."""
    prompt, cached, output = rows
    missed = prompt - cached
    prefill_s = missed * (prices.token_s + prices.pair_s * (cached + 0.5 * missed))
    return prefill_s + output * output_token_s(prices, prompt)


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


def profile_prices(deployment: Deployment, config: EngineConfig, home: Home) -> Prices | None:
    """What the steps of an engine cost, where it was measured. Raises ConfigError."""
    path = existing_profile(deployment, config, home)
    return None if path is None else prices_of(read_profile(path).models[0])


def traits_of(slot: Slot, prices: Prices | None) -> dict[str, object]:
    """What routers know of the engine, as far as it has told, and its profile tells."""
    told = {
        "kv_tokens": None if slot.kv is None else slot.kv.num_tokens,
        "max_running": None if slot.link is None else slot.link.max_running,
        "budget_tokens": None if slot.link is None else slot.link.budget_tokens,
    }
    return {
        **{name: number for name, number in told.items() if number},
        **({} if prices is None else {"prices": asdict(prices)}),
    }


SPENT_PREFIX = "engine_s:"
"""With it and a job's id begins the key of the setting that keeps its engine-seconds."""
SAVE_S = 30.0
LONGEST_LOOK_S = 10.0


@dataclass(slots=True)
class EngineSeconds:
    """Seconds of engines that jobs took, by their ids. While rows are in an engine its time is
    shared between their jobs by rows, and with calls by computed tokens where it tells them. What
    was not saved is lost with the process: half a minute at most."""

    store: Store
    spent_s: dict[str, float] = field(default_factory=dict)
    _unsaved: set[str] = field(default_factory=set)
    _looked_s: float | None = None
    _saved_s: float = 0.0

    def load(self) -> None:
        """Take up what an earlier daemon saved. Blocking."""
        self.spent_s = read_spent(self.store)

    def look(self, slots: Sequence[Slot], now_s: float) -> None:
        """Count the time since the last look, by what is in the engines now (monotonic)."""
        past_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        for slot in slots:
            rows = Counter(job_id for job_id, _ in slot.in_flight)
            share = _offline_share(slot.link) / max(rows.total(), 1)
            for job_id, num_rows in rows.items():
                taken_s = past_s * share * num_rows
                self.spent_s[job_id] = self.spent_s.get(job_id, 0.0) + taken_s
                self._unsaved.add(job_id)

    def save(self, now_s: float, *, at_once: bool = False) -> None:
        """Save what has changed, if that is due. Raises StoreError. Blocking."""
        if not self._unsaved or (now_s - self._saved_s < SAVE_S and not at_once):
            return
        self._saved_s = now_s
        changed = {
            SPENT_PREFIX + job_id: round(self.spent_s[job_id], 3) for job_id in self._unsaved
        }
        jobs.replace_settings(self.store, (), changed)
        self._unsaved.clear()


def read_spent(store: Store) -> dict[str, float]:
    """Engine-seconds by job as they were saved last."""
    found = jobs.list_settings(store, SPENT_PREFIX)
    return {job_id: value for job_id, value in found.items() if isinstance(value, float | int)}


def _offline_share(link: EngineLink | None) -> float:
    """Of the tokens that an engine computed in the last half minute, the part of rows."""
    if link is None or link.history is None:
        return 1.0
    _, first, last = link.history
    offline, online = (
        getattr(last, name).num_computed_tokens - getattr(first, name).num_computed_tokens
        for name in ("offline", "online")
    )
    return offline / (offline + online) if offline > 0 else 1.0
