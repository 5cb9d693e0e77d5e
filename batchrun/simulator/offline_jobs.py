"""Offline jobs of a simulation: from job files, read as the daemon does, or from shapes.

Made-up token ids: the same text has the same tokens, and no other text has them.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchrun.jobs.expected_answers import (
    OutputEstimate,
    estimate_outputs,
    first_guess,
    num_choices,
)
from batchrun.jobs.inputs.input_data import check_columns, open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.pin import fetched_input
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import JobPlan, plan_job
from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainTable, IntArray
from batchrun.pool.radix_tree import PrefixOrder, order_by_prefix
from batchrun.simulator.virtual.engine import FIRST_TOKEN_ID, LAST_TOKEN_ID

Keys = NDArray[np.uint64]
TokenIds = NDArray[np.uint32]

Bounds = tuple[int, int]

NUM_TOKEN_IDS = LAST_TOKEN_ID - FIRST_TOKEN_ID + 1
ROUNDING = 1e-6

_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58_476D_1CE4_E5B9)),
    (np.uint64(27), np.uint64(0x94D0_49BB_1331_11EB)),
)
_LAST_SHIFT = np.uint64(31)


def mixed(keys: ArrayLike, places: ArrayLike) -> Keys:
    """A number for each key and place (splitmix64): equal where both are, else as if drawn."""
    # Arrays wrap around in silence; scalars would warn.
    value = np.atleast_1d(np.asarray(keys, np.uint64)) + (
        np.atleast_1d(np.asarray(places, np.uint64)) * _STEP
    )
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor
    numbers: Keys = value ^ (value >> _LAST_SHIFT)
    return numbers


def prompt_of(chain: Keys, chunk_tokens: float, num_tokens: int, own_key: int) -> TokenIds:
    """The tokens of a prompt whose leading chunks have the keys of `chain`.

    Prompts with equal leading keys have equal leading tokens, `chunk_tokens` for each; what comes
    behind the last key is the prompt's own, by `own_key`.
    """
    places = np.arange(num_tokens, dtype=np.uint64)
    keys = np.full(num_tokens, own_key, np.uint64)
    covered = min(num_tokens, shared_tokens(len(chain), chunk_tokens))
    numbers = (places[:covered] / chunk_tokens).astype(np.int64)
    keys[:covered] = chain[np.minimum(numbers, len(chain) - 1)]
    return (mixed(keys, places) % np.uint64(NUM_TOKEN_IDS)).astype(np.uint32) + np.uint32(
        FIRST_TOKEN_ID
    )


def shared_tokens(num_chunks: int, chunk_tokens: float) -> int:
    """Whole tokens in so many chunks."""
    return int(num_chunks * chunk_tokens + ROUNDING)


def key_of(key: int, place: int) -> int:
    """`mixed` of one pair."""
    return int(mixed(key, place)[0])


CHUNK_TOKENS = 256
"""Tokens at least in a chunk of a document that is drawn from a shape."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class OfflineJob:
    """The rows of a job, and when and how it runs.

    `chains` holds the keys of each row's leading chunks, of `chunk_tokens[row]` tokens; rows that
    share a chunk have it in one size. `order` is the planned order of the rows that can run.
    Lengths are those that the engine sees; the daemon charges `expected_output_tokens` for every
    answer. Rows ask for as many tokens as they get, or with `context_tokens` for no number: the
    limit is then what the prompt leaves of that context. `submit_s` and `deadline_s` are seconds
    from the simulation's start; infinity: no deadline. `is_estimated`: no tokenizer was at hand;
    `answers_source`: where the lengths of answers are from.
    """

    name: str
    chains: ChainTable
    chunk_tokens: FloatArray
    order: PrefixOrder
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    expected_output_tokens: int
    weight: float = 1.0
    submit_s: float = 0.0
    deadline_s: float = math.inf
    context_tokens: int | None = None
    is_estimated: bool = False
    answers_source: str = ""

    @property
    def num_rows(self) -> int:
        """Rows that can run."""
        return len(self.order.rows)

    def estimate_tokens(self, row: int) -> int:
        """Prompt tokens of a row: the simulator knows them."""
        return int(self.num_prompt_tokens[row])

    def expected_tokens(self) -> IntArray:
        """What each row is expected to compute: new prompt tokens, and its answer."""
        sizes = self.chunk_tokens[self.order.rows]
        shared = (self.order.shared_chunks * sizes + ROUNDING).astype(np.int64)
        tokens = self.num_prompt_tokens + self.expected_output_tokens
        tokens[self.order.rows] -= np.minimum(shared, self.num_prompt_tokens[self.order.rows])
        return tokens

    def prompt(self, row: int, seed: int) -> TokenIds:
        """The row's prompt; rows with equal leading keys have equal leading tokens."""
        keys = self.chains.keys[self.chains.starts[row] : self.chains.starts[row + 1]]
        num_tokens = int(self.num_prompt_tokens[row])
        return prompt_of(keys, float(self.chunk_tokens[row]), num_tokens, key_of(seed, row))

    def answer_tokens(self, row: int) -> tuple[int, int | None]:
        """The most tokens that the row's answer may have, and what it has where that is less."""
        num_tokens = int(self.num_output_tokens[row])
        if self.context_tokens is None:
            return num_tokens, None
        return self.context_tokens - int(self.num_prompt_tokens[row]), num_tokens


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
class JobShape:
    """Questions about documents; every pair is the bounds of a uniform draw."""

    num_documents: int = 120
    document_tokens: Bounds | LogNormalTokens = (8_000, 28_000)
    questions: Bounds = (6, 18)
    question_tokens: Bounds = (15, 60)
    output_tokens: Bounds | LogNormalTokens = (4, 32)


def draw_tokens(rng: random.Random, count: Bounds | LogNormalTokens) -> int:
    """A number of tokens, uniform within bounds where no other law is given."""
    return count.draw(rng) if isinstance(count, LogNormalTokens) else rng.randint(*count)


@dataclass(frozen=True, slots=True)
class JobTerms:
    """When a job comes, and what it may ask for. Without a weight: that of the job file, or 1."""

    weight: float | None = None
    submit_s: float = 0.0
    deadline_s: float = math.inf


def job_of_shape(name: str, shape: JobShape, seed: int, terms: JobTerms) -> OfflineJob:
    """Questions about documents: lengths drawn from the seed, rows shuffled in the input."""
    rng = random.Random(seed)
    rows: list[tuple[int, int, int, int]] = []
    for document in range(shape.num_documents):
        num_tokens = draw_tokens(rng, shape.document_tokens)
        for _ in range(rng.randint(*shape.questions)):
            question = rng.randint(*shape.question_tokens)
            rows.append((document, num_tokens, question, draw_tokens(rng, shape.output_tokens)))
    rng.shuffle(rows)
    documents, sizes, questions, outputs = np.array(rows, np.int64).T
    num_chunks = np.maximum(1, sizes // CHUNK_TOKENS)
    starts = np.concatenate(([0], np.cumsum(num_chunks)))
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], num_chunks)
    document_of = np.repeat(documents, num_chunks) << 32
    table = ChainTable(mixed(key_of(seed, len(rows)), document_of + places), starts)
    return OfflineJob(
        name,
        table,
        sizes / num_chunks,
        order_by_prefix(table),
        sizes + questions,
        outputs,
        round(float(outputs.mean())),
        terms.weight or 1.0,
        terms.submit_s,
        terms.deadline_s,
    )


def job_of_file(
    path: Path,
    terms: JobTerms,
    *,
    model_folder: Path | None = None,
    draw_output_tokens: Callable[[int], IntArray] | None = None,
    name: str | None = None,
    estimate: Callable[..., OutputEstimate] = estimate_outputs,
) -> OfflineJob:
    """The job of a job file: planned, ordered and estimated as the daemon does.

    Answers have the length of the `estimate` (asked as `estimate_outputs` is), which the daemon
    expects, or the drawn ones (called with the number of rows). Rows that cannot be rendered end
    with an error in the daemon and are left out. Raises JobSpecError or DataError.
    """
    spec = load_job_file(path, cwd=Path.cwd())
    fetched = fetched_input(spec.input, Path(tempfile.gettempdir()), None)
    with fetched as (given, _), closing(open_input(given)) as data:
        template = RequestTemplate(spec, data.columns, model=spec.model)
        check_columns(spec, data)
        with read_prompts(model_folder, now=datetime.fromtimestamp(0, UTC)) as prompts:
            plan = plan_job(spec, data, template, prompts=prompts)
        expected = estimate(spec, data, plan.tokens.bytes_per_token, guesses=True)
    drawn = None if draw_output_tokens is None else draw_output_tokens(plan.num_rows)
    job = job_of_plan(spec, plan, terms, expected, num_output_tokens=drawn)
    return replace(job, name=name or job.name)


def job_of_plan(
    spec: JobSpec,
    plan: JobPlan,
    terms: JobTerms,
    expected: OutputEstimate | None = None,
    *,
    num_output_tokens: IntArray | None = None,
) -> OfflineJob:
    """The job of a plan. The daemon expects the mean of the estimate, or what it does of a job of
    which it knows nothing; answers are as long as estimated, or as given for each row, and one
    token where there are none. Of several choices one is simulated, and rows that cannot be
    rendered are left out."""
    num = num_choices(spec.request)
    guess = round((first_guess(spec) if expected is None else expected.mean or 0) / num)
    bytes_per_token = plan.tokens.bytes_per_token
    tokens: ArrayLike = np.full(plan.num_rows, guess) if expected is None else expected.filled / num
    tokens = tokens if num_output_tokens is None else num_output_tokens
    outputs = np.maximum(1, np.rint(tokens)).astype(np.int64)
    one = f"; one of {num} choices is simulated" if num > 1 else ""
    faulty = np.fromiter(plan.errors, np.int64, len(plan.errors))
    deadline_s = terms.deadline_s
    if deadline_s == math.inf and spec.deadline_s is not None:
        deadline_s = terms.submit_s + spec.deadline_s
    return OfflineJob(
        spec.name,
        plan.chains,
        np.full(plan.num_rows, CHUNK_BYTES / bytes_per_token),
        _without(plan.order, faulty),
        np.maximum(1, np.rint(plan.text_bytes / bytes_per_token).astype(np.int64)),
        outputs,
        guess,
        terms.weight or spec.weight,
        terms.submit_s,
        deadline_s,
        is_estimated=not plan.tokens.counted[1],
        answers_source="" if expected is None else expected.source + one,
    )


def in_order(job: OfflineJob, rows: IntArray) -> OfflineJob:
    """The job with its rows in this order instead of the planned one: what a client without a pool
    sends. A group is then rows that share a beginning and follow one another."""
    order = PrefixOrder(rows, job.chains.shared_with_previous(rows), job.order.by_chain)
    return replace(job, order=order)


def without_rows(job: OfflineJob, rows: IntArray) -> OfflineJob:
    """The job as if these rows could not run."""
    kept = replace(job, order=_without(job.order, rows))
    return in_order(kept, kept.order.rows)


def _without(order: PrefixOrder, faulty: IntArray) -> PrefixOrder:
    """The order without rows of which nothing is known: they have no text, and stand alone."""
    if not faulty.size:
        return order
    runs = ~np.isin(order.rows, faulty)
    kept = order.by_chain[~np.isin(order.by_chain, faulty)]
    return PrefixOrder(order.rows[runs], order.shared_chunks[runs], kept)
