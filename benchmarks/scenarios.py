"""What benchmarks run on virtual engines: online calls and offline jobs, drawn from a seed.

The scenarios are the reference scenario and those of Echo's evaluation (section 7.1, table 1). The
order of the draws is part of a scenario: a seed means the same requests. Some have lengths that
were counted in real data.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchrun.simulator.offline_jobs import JobShape, LogNormalTokens, draw_tokens
from batchrun.simulator.online import OnlineCall, OnlineTraffic
from batchrun.simulator.virtual.engine import FIRST_TOKEN_ID, LAST_TOKEN_ID
from benchmarks.conversations import Conversations
from benchmarks.data import ARRIVALS, DOCUMENTS

Bounds = tuple[int, int]
TokenIds = NDArray[np.uint32]
JOB_SEEDS = 1_000_000
"""The seeds of one job, before those of the next."""
LONGEST_S = 7_200.0
"""A run that goes on to the end of its jobs ends there if they have not."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens, for how long, and the KV sizes in blocks that the ablation runs it with.

    The jobs `beside` run at the same time as `job`. With `is_to_end` a run goes on until all jobs
    have ended, for `duration_s` at most.
    """

    name: str
    duration_s: float
    online: OnlineTraffic | CallTable | Conversations
    job: JobSource = field(default_factory=JobShape)
    blocks: tuple[int, ...] = (8600, 4300)
    beside: tuple[JobSource, ...] = ()
    is_to_end: bool = False


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


def draw_calls(scenario: Scenario, seed: int) -> list[OnlineCall]:
    """The online calls of a run, by arrival."""
    return scenario.online.draw(scenario.duration_s, seed)


def draw_jobs(scenario: Scenario, seed: int, order: Order) -> list[Job]:
    """All jobs of a run; no two of them share any text."""
    sources = (scenario.job, *scenario.beside)
    return [
        draw_job(source, seed + number * JOB_SEEDS, order) for number, source in enumerate(sources)
    ]


def draw_job(source: JobSource, seed: int, order: Order) -> Job:
    """The job of a run. About 20 ms per 100 documents of a shape."""
    if not isinstance(source, JobShape):
        return source.draw(seed, order)
    rng = random.Random(seed)
    documents: list[TokenIds] = []
    rows: list[JobRow] = []
    for document in range(source.num_documents):
        documents.append(draw_token_ids(rng, draw_tokens(rng, source.document_tokens)))
        for _ in range(rng.randint(*source.questions)):
            question = draw_token_ids(rng, rng.randint(*source.question_tokens))
            rows.append(
                JobRow(len(rows), document, question, draw_tokens(rng, source.output_tokens))
            )
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


def hit_optimum(job: Job, block_tokens: int = 16) -> float:
    """The highest prefix hit rate that the whole job can have, with KV without bound.

    Every document is computed once; each later row about it hits its full blocks. A hit never
    covers a whole prompt, which matters only where a question is empty.
    """
    seen: set[int] = set()
    hits = prompts = 0
    for row in job.rows:
        prompts += job.num_prompt_tokens(row)
        if row.document in seen:
            hits += len(job.documents[row.document]) // block_tokens * block_tokens
        seen.add(row.document)
    return hits / prompts


@dataclass(frozen=True, slots=True, eq=False)
class CallTable:
    """Online calls of a recorded trace, read in a circle.

    `arrivals_s` rise from 0 to less than `span_s`, in recorded seconds. The clock runs
    `time_scale` times slower than the record, which thins the load and keeps its form (as Echo
    scales its trace, section 7.1). Seed s begins s windows of `window_s` slowed seconds into the
    circle, so that seeds 0 to 4 read other calls than one another and than their warm-ups.
    """

    arrivals_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    span_s: float
    time_scale: float = 1.0
    window_s: float = 200.0

    def draw(self, duration_s: float, seed: int) -> list[OnlineCall]:
        """The calls of `duration_s` seconds from where the seed begins; their clock starts at 0."""
        circle_s = self.span_s * self.time_scale
        start_s = (seed * self.window_s) % circle_s
        calls: list[OnlineCall] = []
        for turn in range(math.ceil((start_s + duration_s) / circle_s)):
            for i, recorded_s in enumerate(self.arrivals_s):
                at_s = turn * circle_s + recorded_s * self.time_scale - start_s
                if 0 <= at_s < duration_s:
                    calls.append(OnlineCall(at_s, self.prompt_tokens[i], self.output_tokens[i]))
        return calls


@dataclass(frozen=True, slots=True, eq=False)
class JobTable:
    """A job with one row per question of the given documents.

    A document is its tokens, and for each question the tokens of question and answer.
    """

    documents: Sequence[tuple[int, Sequence[tuple[int, int]]]]

    def draw(self, seed: int, order: Order) -> Job:
        """The job with token ids and, if shuffled, an order of its seed."""
        rng = random.Random(seed)
        rows: list[JobRow] = []
        for number, (_, questions) in enumerate(self.documents):
            for num_question_tokens, num_output_tokens in questions:
                question = draw_token_ids(rng, num_question_tokens)
                rows.append(JobRow(len(rows), number, question, num_output_tokens))
        if order is Order.SHUFFLED:
            rng.shuffle(rows)
        return Job([draw_token_ids(rng, num_tokens) for num_tokens, _ in self.documents], rows)


JobSource = JobShape | JobTable


def azure_calls(time_scale: float, token_scale: float = 1.0) -> CallTable:
    """The Azure conversation trace, its gaps and lengths multiplied."""
    trace = read_table(ARRIVALS)
    return CallTable(
        [at_ms / 1e3 for at_ms in accumulate(trace["gap_ms"])],
        [scaled(tokens, token_scale) for tokens in trace["prompt_tokens"]],
        [scaled(tokens, token_scale) for tokens in trace["output_tokens"]],
        trace["span_s"],
        time_scale,
    )


def scaled(num_tokens: int, scale: float) -> int:
    """So many times the tokens; as many with a scale of 1, else at least two."""
    return num_tokens if scale == 1 else max(2, round(num_tokens * scale))


def read_table(path: Path) -> dict[str, Any]:
    """A table of `benchmarks.data`."""
    table: dict[str, Any] = json.loads(path.read_text())
    return table


CHAT_PROMPT = LogNormalTokens(5.3, 1.0, (8, 2000))
CHAT_OUTPUT = LogNormalTokens(5.0, 0.8, (4, 800))
CHATS = OnlineTraffic(
    rate_per_s=2.0,
    burst_factor=4.0,
    burst_length_s=8.0,
    burst_period_s=90.0,
    prompt=CHAT_PROMPT,
    output=CHAT_OUTPUT,
    swing=0.8,
)
ECHO_SWING = 5 / 7
ECHO_CHATS = replace(CHATS, swing=ECHO_SWING, swing_s=180.0 / math.tau)
"""ShareGPT lengths under a tide whose peak is six times its ebb (Echo, section 2.2), once up and
down in 180 s, with the bursts of the reference scenario."""
LONG_BURSTS = OnlineTraffic(
    rate_per_s=1.0,
    burst_factor=6.0,
    burst_length_s=20.0,
    burst_period_s=60.0,
    prompt=LogNormalTokens(6.6, 0.9, (8, 4096)),
    output=LogNormalTokens(4.8, 0.8, (4, 600)),
)


def a100_8b(*, burst_factor: float = 4.0) -> Scenario:
    """The reference scenario, 180 s. The stress row has a burst factor of 6."""
    name = "a100-8b" if burst_factor == 4.0 else f"a100-8b-burst-{burst_factor:g}"
    return Scenario(name, 180.0, replace(CHATS, burst_factor=burst_factor))


def shared_prompts(system_tokens: int) -> Scenario:
    """The reference scenario with one system prompt in front of every call."""
    online = replace(CHATS, system_tokens=system_tokens)
    return Scenario(f"shared-prompts-{system_tokens}", 180.0, online)


def onset(burst_factor: float) -> Scenario:
    """Steady chats, and so many times as many for 10 s out of 60, on an engine full of rows."""
    online = replace(
        CHATS, burst_factor=burst_factor, burst_length_s=10.0, burst_period_s=60.0, swing=0.0
    )
    return Scenario(f"onset-{burst_factor:g}", 180.0, replace(online, burst_at_s=30.0))


def heavy_tail(rate_per_s: float) -> Scenario:
    """Chats in clusters: gaps between calls with a coefficient of variation of 10."""
    online = replace(CHATS, rate_per_s=rate_per_s, burst_factor=1.0, swing=0.0, gap_cv=10.0)
    return Scenario(f"heavy-tail-{rate_per_s:g}", 180.0, online)


REASONING = Scenario(
    "reasoning",
    180.0,
    replace(
        CHATS,
        rate_per_s=1.0,
        burst_factor=1.0,
        swing=0.0,
        output=LogNormalTokens(math.log(2000), 0.5, (100, 8000)),
    ),
    blocks=(8600,),
)
"""A call a second with answers of 2,000 tokens (median): alone, calls come to hold two
thirds of the KV."""
SPARSE = Scenario(
    "sparse", 300.0, replace(CHATS, rate_per_s=0.2, burst_factor=1.0, swing=0.0), blocks=(8600,)
)
"""A call every five seconds: nearly every one finds an engine with rows alone."""
KV_PRESSURE = Scenario("kv-pressure", 240.0, LONG_BURSTS, blocks=(4300, 3200))
"""Long prompts in long bursts: where the reserve and eviction matter."""
KV_PRESSURE_TIDE = Scenario(
    "kv-pressure-tide",
    7200.0,
    replace(LONG_BURSTS, swing=0.5, swing_s=7200.0 / math.tau),
    JobShape(num_documents=3_000),
    (4300, 3200),
)
"""Two hours of it under one tide: its rate swings by half, once up, once down."""
CONVERSATIONS = JobShape(
    num_documents=6_000,
    document_tokens=CHAT_PROMPT,
    questions=(1, 1),
    question_tokens=(1, 1),
    output_tokens=CHAT_OUTPUT,
)
"""Echo's job of conversations: short prompts (308 tokens on average in its table 1), of which under
5 % are shared; here none are."""
QA_SHORT = JobShape(
    num_documents=76,
    document_tokens=(15_000, 31_880),
    questions=(12, 25),
    question_tokens=(8, 34),
    output_tokens=(4, 64),
)
"""Echo's LooGLE QA_Short: prompts of 23,474 tokens on average (its table 1), whose answers stand in
one place: as many documents as fit a context of 32,768. Numbers of questions and their lengths are
LooGLE's."""
QA_LONG = replace(QA_SHORT, questions=(6, 11), question_tokens=(15, 101))
"""The same documents with fewer and longer questions."""
FOUR_JOBS = (
    JobShape(num_documents=24),
    JobShape(600, CHAT_PROMPT, (1, 1), (1, 1), CHAT_OUTPUT),
    JobShape(1, (2_000, 2_000), (700, 700), (150, 450), (4, 16)),
    JobShape(40, (2_000, 5_000), (8, 16), (50, 250), (32, 128)),
)
"""Questions about long documents; conversations that share nothing; texts to classify behind one
instruction; tasks behind descriptions of tools."""
MANY_JOBS = Scenario(
    "many-jobs", LONGEST_S, CHATS, FOUR_JOBS[0], beside=FOUR_JOBS[1:], is_to_end=True
)
"""They come at once and have equal weights."""
AGENTS = Scenario(
    "agents",
    180.0,
    Conversations(
        rate_per_s=0.35,
        turns=(2, 9),
        think_s=8.0,
        message=LogNormalTokens(5.0, 1.0, (8, 2000)),
        answer=LogNormalTokens(4.6, 0.8, (4, 600)),
        system_tokens=2_000,
    ),
)
"""About two calls a second, of which two in three find what was said before if it is still there;
the open conversations have about a tenth of 8,600 blocks."""
PEAK_CHATS = replace(ECHO_CHATS, rate_per_s=2.0 * (1 + ECHO_SWING), swing=0.0)
"""The peak of the tide all the time: the run behind Echo's 78.6 % (section 1, figure 9)."""
AZURE_TIME_SCALE = 2.0
"""2.6 calls a second instead of 5.2: no queue without offline work, as Echo scales its trace."""
MAX_DOCUMENT_TOKENS = 32_000
"""Two meetings of QMSum are longer than the engine's context allows."""


def real_documents() -> JobTable:
    """All documents of LooGLE's sample and of QMSum."""
    tables = read_table(DOCUMENTS)
    documents = [*tables["loogle"], *tables["qmsum"]]
    return JobTable([each for each in documents if each[0] <= MAX_DOCUMENT_TOKENS])


SCENARIOS = {
    "a100-8b": a100_8b(),
    "a100-8b-stress": replace(a100_8b(burst_factor=6.0), blocks=(8600, 4300, 2600)),
    **{f"shared-prompts-{tokens}": shared_prompts(tokens) for tokens in (400, 2000)},
    **{f"onset-{factor:g}": onset(factor) for factor in (5.0, 10.0)},
    **{f"heavy-tail-{rate:g}": heavy_tail(rate) for rate in (1.0, 3.0)},
    "reasoning": REASONING,
    "sparse": SPARSE,
    "many-jobs": MANY_JOBS,
    "agents": AGENTS,
    "kv-pressure": KV_PRESSURE,
    "kv-pressure-tide": KV_PRESSURE_TIDE,
    "loogle-azure": Scenario(
        "loogle-azure", 180.0, azure_calls(AZURE_TIME_SCALE), real_documents()
    ),
    "echo-sharegpt": Scenario("echo-sharegpt", 180.0, ECHO_CHATS, CONVERSATIONS),
    "echo-qa-short": Scenario("echo-qa-short", 180.0, ECHO_CHATS, QA_SHORT),
    "echo-qa-long": Scenario("echo-qa-long", 180.0, ECHO_CHATS, QA_LONG),
    "unknown-lengths": Scenario("unknown-lengths", 180.0, ECHO_CHATS, CONVERSATIONS, (8600,)),
    "unknown-lengths-documents": Scenario(
        "unknown-lengths-documents", 180.0, CHATS, blocks=(8600,)
    ),
    "echo-hit-rate": Scenario("echo-hit-rate", 180.0, PEAK_CHATS, QA_SHORT, (8600,)),
}
