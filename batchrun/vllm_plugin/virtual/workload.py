"""The scenarios of design 6.4: online calls and an offline job, drawn from a seed.

The draws are those of the trial that made the design's figures, in its order, so that a seed means
the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from batchrun.pool.prefix_order import order_by_prefix
from batchrun.vllm_plugin.virtual.requests import FIRST_TOKEN_ID, LAST_TOKEN_ID

Bounds = tuple[int, int]
TokenIds = NDArray[np.uint32]

MIN_RATE_PER_S = 0.05


@dataclass(frozen=True, slots=True)
class LogNormalTokens:
    """A number of tokens: log-normal(mu, sigma), clipped to `bounds`."""

    mu: float
    sigma: float
    bounds: Bounds

    def draw(self, rng: random.Random) -> int:
        """One number."""
        least, most = self.bounds
        return int(min(most, max(least, rng.lognormvariate(self.mu, self.sigma))))


@dataclass(frozen=True, slots=True)
class OnlineTraffic:
    """Poisson arrivals at rate_per_s * (1 + swing * sin(t / swing_s)), times `burst_factor`
    in the first `burst_length_s` of every `burst_period_s`."""

    rate_per_s: float
    burst_factor: float
    burst_length_s: float
    burst_period_s: float
    prompt: LogNormalTokens
    output: LogNormalTokens
    swing: float = 0.0
    swing_s: float = 60.0

    def rate_at(self, t_s: float) -> float:
        """Arrivals per second at an instant; never quite 0."""
        is_burst = t_s % self.burst_period_s < self.burst_length_s
        tide = 1 + self.swing * math.sin(t_s / self.swing_s)
        return max(self.rate_per_s * tide * (self.burst_factor if is_burst else 1), MIN_RATE_PER_S)


@dataclass(frozen=True, slots=True)
class JobShape:
    """Questions about documents; every pair is the bounds of a uniform draw."""

    num_documents: int = 120
    document_tokens: Bounds = (8_000, 28_000)
    questions: Bounds = (6, 18)
    question_tokens: Bounds = (15, 60)
    output_tokens: Bounds = (4, 32)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens, for how long, and what online users were promised."""

    name: str
    duration_s: float
    online: OnlineTraffic
    job: JobShape = JobShape()
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class OnlineCall:
    """One online request."""

    arrival_at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class JobRow:
    """One question about a document; `number` is its place before any shuffling."""

    number: int
    document: int
    question: TokenIds
    num_output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Documents and the rows about them, in input order."""

    documents: Sequence[TokenIds]
    rows: Sequence[JobRow]

    def num_prompt_tokens(self, row: JobRow) -> int:
        """Document and question."""
        return len(self.documents[row.document]) + len(row.question)


class Order(StrEnum):
    """How the rows of a job stand in its input."""

    SHUFFLED = "shuffled"
    GROUPED = "grouped"


def a100_8b(*, burst_factor: float = 4.0) -> Scenario:
    """The reference scenario, 180 s. The stress row has a burst factor of 6."""
    online = OnlineTraffic(
        rate_per_s=2.0,
        burst_factor=burst_factor,
        burst_length_s=8.0,
        burst_period_s=90.0,
        prompt=LogNormalTokens(5.3, 1.0, (8, 2000)),
        output=LogNormalTokens(5.0, 0.8, (4, 800)),
        swing=0.8,
    )
    name = "a100-8b" if burst_factor == 4.0 else f"a100-8b-burst-{burst_factor:g}"
    return Scenario(name, 180.0, online)


def kv_pressure() -> Scenario:
    """Long prompts in long bursts, 240 s: where the reserve and eviction matter."""
    return Scenario("kv-pressure", 240.0, _pressing_traffic())


def kv_pressure_tide() -> Scenario:
    """Two hours of `kv-pressure` under one tide: its rate swings by half, once up, once down."""
    duration_s = 7200.0
    online = _pressing_traffic(swing=0.5, swing_s=duration_s / math.tau)
    return Scenario("kv-pressure-tide", duration_s, online, JobShape(num_documents=3_000))


def _pressing_traffic(*, swing: float = 0.0, swing_s: float = 60.0) -> OnlineTraffic:
    return OnlineTraffic(
        rate_per_s=1.0,
        burst_factor=6.0,
        burst_length_s=20.0,
        burst_period_s=60.0,
        prompt=LogNormalTokens(6.6, 0.9, (8, 4096)),
        output=LogNormalTokens(4.8, 0.8, (4, 600)),
        swing=swing,
        swing_s=swing_s,
    )


def draw_calls(scenario: Scenario, seed: int) -> list[OnlineCall]:
    """The online calls of a run, by arrival."""
    rng, traffic, t_s = random.Random(1000 + seed), scenario.online, 0.0
    calls: list[OnlineCall] = []
    while True:
        t_s += rng.expovariate(traffic.rate_at(t_s))
        if t_s >= scenario.duration_s:
            return calls
        calls.append(OnlineCall(t_s, traffic.prompt.draw(rng), traffic.output.draw(rng)))


def draw_job(shape: JobShape, seed: int, order: Order) -> Job:
    """The job of a run. About 20 ms per 100 documents."""
    rng = random.Random(seed)
    documents: list[TokenIds] = []
    rows: list[JobRow] = []
    for document in range(shape.num_documents):
        documents.append(draw_token_ids(rng, rng.randint(*shape.document_tokens)))
        for _ in range(rng.randint(*shape.questions)):
            question = draw_token_ids(rng, rng.randint(*shape.question_tokens))
            num_output_tokens = rng.randint(*shape.output_tokens)
            rows.append(JobRow(len(rows), document, question, num_output_tokens))
    if order is Order.SHUFFLED:
        rng.shuffle(rows)
    return Job(documents, rows)


def draw_token_ids(rng: random.Random, num_tokens: int) -> TokenIds:
    """`[rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]`, to the bit.

    Takes the generator's words in bulk and rejects as `randint` does: 40 times faster.
    """
    span = LAST_TOKEN_ID - FIRST_TOKEN_ID + 1
    parts: list[TokenIds] = []
    while num_tokens > 0:
        words = np.frombuffer(
            rng.getrandbits(32 * num_tokens).to_bytes(4 * num_tokens, "little"), "<u4"
        )
        drawn = words >> np.uint32(32 - span.bit_length())
        parts.append(drawn[drawn < span] + np.uint32(FIRST_TOKEN_ID))
        num_tokens -= len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def planned_order(job: Job) -> Job:
    """The job with its rows in the order in which the daemon's pool sends them."""
    chains = [np.array([row.document], np.uint64) for row in job.rows]
    return Job(job.documents, [job.rows[i] for i in order_by_prefix(chains).rows])
