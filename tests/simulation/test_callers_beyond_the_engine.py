"""Callers who see tokens later than the engine hands them on, now more, now less: their promises
are kept once the gateway's counts reach the engine, and rows go on."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field, replace

from engine_pairs import engine_of, ours

from batchrun.simulator.offline_jobs import LogNormalTokens
from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.simulator.virtual.setup import NONCE
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.wire import FeltCalls, Orders, encode
from benchmarks.row_feeds import RowSource, callers
from benchmarks.scenarios import CHATS, Order, Scenario, draw_calls, draw_job

ANSWERS = LogNormalTokens(math.log(12), 0.5, (4, 40))
TRAFFIC = replace(CHATS, rate_per_s=4.0, burst_factor=1.0, swing=0.0, output=ANSWERS)
SCENARIO = Scenario("short answers", 24.0, TRAFFIC)
TPOT_S, TTFT_S = 0.05, 1.0
LONGEST_DELAY_S = 0.08
COUNTS_EVERY_S = 2.0


@dataclass
class Gateway:
    """Sees each token up to `LONGEST_DELAY_S` after it left the engine, and counts late calls."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))
    late: list[bool] = field(default_factory=list)
    num_late_first: int = 0

    def see(self, record: RequestRecord) -> None:
        """A call has ended."""
        times_s = record.token_times_s
        if not record.is_online or len(times_s) < 2:
            return
        first_s = times_s[0] + self.rng.uniform(0.0, LONGEST_DELAY_S)
        last_s = max(first_s, times_s[-1] + self.rng.uniform(0.0, LONGEST_DELAY_S))
        self.num_late_first += first_s - record.arrival_at_s > TTFT_S
        self.late.append((last_s - first_s) / (len(times_s) - 1) > TPOT_S)

    def counts(self) -> FeltCalls:
        num = len(self.late)
        return FeltCalls(num, self.num_late_first, num, sum(self.late))


def run(*, is_told: bool) -> tuple[Gateway, int, float]:
    """What the gateway saw, the tokens of rows, and what is kept back of an answer at the end."""
    job = RowSource(draw_job(SCENARIO.job, 1, Order.GROUPED), 256)
    engine = engine_of(ColocatedScheduler, [callers(draw_calls(SCENARIO, 1), 1), job])
    gateway, numbers = Gateway(), itertools.count()
    engine.end_listeners.append(gateway.see)
    at_s = 0.0
    while at_s < SCENARIO.duration_s:
        felt = gateway.counts() if is_told else None
        orders = Orders(NONCE, 1, next(numbers), felt=felt)
        ours(engine).daemon_link.control.receive(encode(orders))
        at_s += COUNTS_EVERY_S
        engine.run_until(at_s)
    margin_s = ours(engine).daemon_link.telemetry(engine.now_s).margin.tpot_s
    return gateway, engine.totals.num_offline_computed_tokens, margin_s


def test_callers_beyond_a_slow_way_find_their_promises_kept() -> None:
    blind, tokens_blind, _ = run(is_told=False)
    seeing, tokens, margin_s = run(is_told=True)

    assert len(seeing.late) == len(blind.late) > 60
    assert sum(blind.late) > 0.15 * len(blind.late)
    assert sum(seeing.late) < 0.05 * len(seeing.late)
    assert tokens > 0.85 * tokens_blind
    assert 0.0 < margin_s <= TPOT_S
