"""A job looked at as a whole: Preble's prompt study, hit rates, and the order of a run.

Tokens of the prompt tree are counted on a sample of its rows and estimated from bytes for the rest.
How long answers are: what came back, else what the data says, else the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import DEFAULT_BYTES_PER_TOKEN, PromptReader, TokenCounter
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import JobPlan, plan_job
from batchrun.pool.expected_hits import RowWalk, expected_hits
from batchrun.pool.prefix_keys import ChainBuilder, IntArray
from batchrun.pool.prompt_study import (
    Cuts,
    FloatArray,
    PromptStudy,
    PromptTree,
    TreeTokens,
    path_sums,
    servable_tokens,
    study_prompts,
)
from batchrun.pool.radix_tree import NO_NODE
from batchrun.store import results as result_records
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord
from batchrun.types import ProgressSink

LIMIT_KEYS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ANSWER_COLUMNS = ("answer", "answers", "reference", "expected", "completion", "output")
"""A column of such a name that the job keeps holds what a good answer would be."""
MAX_RESULTS = 2_000
"""So many finished rows are looked at one by one; means are of all."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputEstimate:
    """`tokens[row]` is NaN where nothing is known of the row; `source` says where they are from."""

    tokens: FloatArray
    mean: float | None
    source: str

    @property
    def filled(self) -> FloatArray:
        """One value for every row: the mean where nothing is known, 0 where that is unknown too."""
        filled: FloatArray = np.where(np.isnan(self.tokens), self.mean or 0.0, self.tokens)
        return filled

    @property
    def std(self) -> float | None:
        """Deviation over the rows of which something is known."""
        return float(np.nanstd(self.tokens)) if (~np.isnan(self.tokens)).any() else None


def output_limit(spec: JobSpec) -> int | None:
    """The most output tokens of a row that the job file allows, where it says so."""
    limits = (spec.request.get(key) for key in LIMIT_KEYS)
    return next((limit for limit in limits if isinstance(limit, int)), None)


def estimate_outputs(
    spec: JobSpec, data: InputData, stored: tuple[Store, JobRecord] | None, bytes_per_token: float
) -> OutputEstimate:
    """The best estimate there is. Raises DataError when the input cannot be read."""
    if stored is not None:
        returned = _returned(*stored)
        if returned is not None:
            return returned
    in_data = answers_in_data(spec, data, bytes_per_token)
    if in_data is not None:
        return in_data
    limit = output_limit(spec)
    tokens = np.full(data.num_rows, np.nan if limit is None else float(limit))
    if limit is None:
        return OutputEstimate(tokens, None, "unknown")
    return OutputEstimate(tokens, float(limit), "the limit in the job file")


def answers_in_data(
    spec: JobSpec, data: InputData, bytes_per_token: float
) -> OutputEstimate | None:
    """What a column of good answers says, where the job keeps one. Raises DataError."""
    column = next((name for name in ANSWER_COLUMNS if name in spec.output.keep), None)
    if column is None or column not in data.columns:
        return None
    answers = _answers(data, column, bytes_per_token, output_limit(spec))
    if np.isnan(answers).all():
        return None
    return OutputEstimate(answers, float(np.nanmean(answers)), f"the column {column!r}")


def _returned(store: Store, record: JobRecord) -> OutputEstimate | None:
    """What finished rows returned; None while none has."""
    counts = result_records.count(store, record.seq)
    if not counts.num_completed:
        return None
    tokens = np.full(record.num_rows, np.nan)
    for result in result_records.read(store, record.seq, limit=MAX_RESULTS):
        if result.error is None:
            tokens[result.row] = result.usage.num_output_tokens
    mean = counts.num_output_tokens / counts.num_completed
    return OutputEstimate(tokens, mean, f"the {counts.num_completed:,} rows that are done")


def _answers(data: InputData, column: str, bytes_per_token: float, limit: int | None) -> FloatArray:
    """Tokens of the texts in a column, and one for the end of the answer; NaN where empty."""
    parts = [np.empty(0)]
    for _, batch in data.iter_batches([column]):
        values = batch.column(0)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            return np.full(data.num_rows, np.nan)
        parts.append(pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False))
    num_bytes = np.concatenate(parts).astype(np.float64)
    tokens = np.where(num_bytes > 0, num_bytes / bytes_per_token + 1, np.nan)
    capped: FloatArray = tokens if limit is None else np.minimum(tokens, limit)
    return capped


SAMPLE_ROWS = 2_048
SAMPLE_BYTES = 6 << 20
"""Most text that is tokenised; a few seconds."""
SEGMENT_BYTES = 256 << 10
"""Of a longer segment only the beginning is tokenised."""
CONTEXT_BYTES = 128
"""Text before a segment that is tokenised with it: a cut within a token counts on both sides."""
ROWS_PER_READ = 16
MAX_LEVEL = 4
"""Nodes this deep or deeper are taken to be alike in bytes per token; leaves are level 0."""

ReadTexts = Callable[[IntArray], list[bytes]]
"""The prompt texts of some rows."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedTree:
    """`tokens` of all nodes and leaves; `num_rows` were sampled, with `num_bytes` tokenised."""

    tokens: TreeTokens
    bytes_per_token: float
    num_rows: int
    num_bytes: int


def count_tree(
    tree: PromptTree,
    read_texts: ReadTexts,
    count: TokenCounter | None,
    rng: np.random.Generator,
) -> CountedTree:
    """Tokens of every node and leaf. What no sampled row has gets the bytes per token of what is
    as deep in the tree. Without `count`, `DEFAULT_BYTES_PER_TOKEN` holds for all."""
    sample = _Sample(tree, count)
    if count is not None:
        spread = np.linspace(0, tree.num_rows - 1, min(SAMPLE_ROWS, tree.num_rows))
        positions = rng.permutation(np.unique(spread.round().astype(np.int64)))
        for start in range(0, len(positions), ROWS_PER_READ):
            if sample.num_bytes >= SAMPLE_BYTES:
                break
            part = positions[start : start + ROWS_PER_READ]
            for position, text in zip(part.tolist(), read_texts(tree.rows[part]), strict=True):
                sample.add(position, text)
    return sample.result()


class _Sample:
    """What was counted of a tree so far: a node once, however many sampled rows have it."""

    def __init__(self, tree: PromptTree, count: TokenCounter | None) -> None:
        self._tree = tree
        self._count = count
        self._levels = path_sums(tree.nodes.parents, np.ones(tree.nodes.num_nodes))
        self._node_tokens = np.full(tree.nodes.num_nodes, np.nan)
        self._leaf_tokens = np.full(tree.num_rows, np.nan)
        self._sums = np.zeros((MAX_LEVEL + 1, 2))
        self._num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Bytes tokenised."""
        return int(self._sums[:, 0].sum())

    def add(self, position: int, text: bytes) -> None:
        """Count what is new in a row."""
        if self.num_bytes >= SAMPLE_BYTES:
            return
        self._num_rows += 1
        for node, start, end in self._segments(position, len(text)):
            if node is None:
                self._leaf_tokens[position] = self._tokens(text, start, end, 0)
            elif np.isnan(self._node_tokens[node]):
                level = min(int(self._levels[node]), MAX_LEVEL)
                self._node_tokens[node] = self._tokens(text, start, end, level)

    def result(self) -> CountedTree:
        """All nodes and leaves, counted or estimated."""
        levels = np.minimum(self._levels, MAX_LEVEL).astype(np.int64)
        ratios = self._bytes_per_token()
        nodes = _filled(self._node_tokens, self._tree.node_bytes / ratios[levels])
        leaves = _filled(self._leaf_tokens, self._tree.leaf_bytes / ratios[0])
        num_tokens = (path_sums(self._tree.nodes.parents, nodes), leaves)
        total = float(np.append(num_tokens[0], 0.0)[self._tree.innermost].sum() + leaves.sum())
        mean = float(self._tree.text_bytes.sum()) / total if total else DEFAULT_BYTES_PER_TOKEN
        return CountedTree(TreeTokens(nodes, leaves), mean, self._num_rows, self.num_bytes)

    def _segments(self, position: int, num_bytes: int) -> Iterator[tuple[int | None, int, int]]:
        """(node or None for the leaf, first byte, end) along a row."""
        start = 0
        for node in self._tree.nodes.path(position):
            end = int(self._tree.depth_bytes[node])
            yield node, start, end
            start = end
        yield None, start, num_bytes

    def _tokens(self, text: bytes, start: int, end: int, level: int) -> float:
        """Tokens of a segment, which join the sums of its level."""
        assert self._count is not None
        stop = min(end, start + SEGMENT_BYTES)
        if stop <= start:
            return 0.0
        before = max(start - CONTEXT_BYTES, 0)
        tokens = self._count(text[before:stop]) - self._count(text[before:start])
        self._sums[level] += (stop - start, tokens)
        return tokens * (end - start) / (stop - start)

    def _bytes_per_token(self) -> FloatArray:
        """By level; where nothing was counted, that of all levels together."""
        num_bytes, num_tokens = self._sums.sum(axis=0)
        overall = num_bytes / num_tokens if num_tokens else DEFAULT_BYTES_PER_TOKEN
        ratios = np.full(MAX_LEVEL + 1, overall)
        known = self._sums[:, 1] > 0
        ratios[known] = self._sums[known, 0] / self._sums[known, 1]
        return ratios


def _filled(counted: FloatArray, estimated: FloatArray) -> FloatArray:
    return np.where(np.isnan(counted), estimated, counted)


EXCERPT_CHARS = 60
MOST_BACK_BYTES = 24


@dataclass(frozen=True, slots=True)
class KvSize:
    """The KV cache of one engine, the smallest where there are several.

    `tokens` is None while unknown. The sources say in words where each figure is from.
    """

    tokens: int | None
    source: str
    block_tokens: int
    block_source: str


@dataclass(frozen=True, slots=True, eq=False)
class HitRates:
    """Shares (0 to 1) of the prompt tokens that the prefix cache serves.

    `best`: no cache could forget. `expected` and `as_written`: one of the given size, rows in the
    order of a run with batchrun's eviction, and as the input has them with LRU; None where the
    size is unknown, or no row fits. `num_too_large` rows need more than the whole cache.
    """

    best: float
    expected: float | None
    as_written: float | None
    num_too_large: int


@dataclass(frozen=True, slots=True)
class OrderStretch:
    """Rows that run one after the other and have the same key portion; `begins` is how its text
    begins. Rows that have theirs for themselves stand together too.

    `shared_tokens` of the `prompt_tokens` are those of prefixes that a row before has.
    """

    begins: str
    is_shared: bool
    first_row: int
    num_rows: int
    prompt_tokens: float
    shared_tokens: float


@dataclass(frozen=True, slots=True, eq=False)
class JobStudy:
    """What is known of a job before it runs; arrays of `study` go by position in `tree`.

    `planned` has the positions in the order of a run, `planned_shared[i]` the tokens that the i-th
    of them shares with a row before it.
    """

    plan: JobPlan
    tree: PromptTree
    counted: CountedTree
    study: PromptStudy
    planned: IntArray
    planned_shared: FloatArray
    read_texts: ReadTexts

    def hit_rates(self, kv: KvSize, outputs: OutputEstimate) -> HitRates:
        """What a prefix cache can serve of this job."""
        prompts = self.study.prompts[self.planned]
        best = servable_tokens(self.planned_shared, prompts, kv.block_tokens)
        best_rate = float(best.sum() / prompts.sum()) if len(prompts) else 0.0
        if kv.tokens is None:
            return HitRates(best_rate, None, None, 0)
        as_written = np.argsort(self.tree.rows)
        planned, num_too_large = self._rate(self.planned, kv, outputs, drops_used=True)
        written, _ = self._rate(as_written, kv, outputs, drops_used=False)
        return HitRates(best_rate, planned, written, num_too_large)

    def stretches(self, limit: int) -> Iterator[OrderStretch]:
        """The first `limit` stretches of the order. Reads a row of each."""
        keys = self.study.key_nodes[self.planned]
        bounds = np.append(np.flatnonzero(np.diff(keys, prepend=-2)), len(keys))
        num_shown = min(limit, len(bounds) - 1)
        firsts = self.planned[bounds[:num_shown]]
        texts = self.read_texts(self.tree.rows[firsts]) if num_shown else []
        for index, (position, text) in enumerate(zip(firsts.tolist(), texts, strict=True)):
            places = slice(bounds[index], bounds[index + 1])
            node = int(self.study.key_nodes[position])
            yield OrderStretch(
                begins=self._beginning(position, node, text),
                is_shared=node != NO_NODE,
                first_row=int(self.tree.rows[position]),
                num_rows=int(bounds[index + 1] - bounds[index]),
                prompt_tokens=float(self.study.prompts[self.planned[places]].sum()),
                shared_tokens=float(self.planned_shared[places].sum()),
            )

    def _rate(
        self, order: IntArray, kv: KvSize, outputs: OutputEstimate, *, drops_used: bool
    ) -> tuple[float | None, int]:
        """(share of the prompt tokens of the rows that fit the cache, rows that do not)."""
        assert kv.tokens is not None
        own = self.counted.tokens.leaves + outputs.filled[self.tree.rows]
        walk = RowWalk(
            self.tree.innermost[order],
            own[order],
            self.tree.nodes.parents,
            self.counted.tokens.nodes,
        )
        found = expected_hits(walk, kv.tokens, drops_used=drops_used)
        fits = ~np.isnan(found)
        prompts = self.study.prompts[order][fits]
        hits = servable_tokens(found[fits], prompts, kv.block_tokens)
        rate = float(hits.sum() / prompts.sum()) if prompts.size else None
        return rate, int(np.count_nonzero(~fits))

    def _beginning(self, position: int, node: int, text: bytes) -> str:
        above = self.tree.innermost[position] if node == NO_NODE else self.tree.nodes.parents[node]
        start = 0 if above == NO_NODE else int(self.tree.depth_bytes[above])
        return _excerpt(text, start)


def study_job(
    spec: JobSpec,
    data: InputData,
    template: RequestTemplate,
    prompts: PromptReader,
    progress: ProgressSink | None = None,
) -> JobStudy:
    """Reads the whole input once, and a sample of it again for its tokens.

    Raises DataError when the input cannot be read.
    """
    cuts = Cuts()
    chains = ChainBuilder(0, cuts)
    plan = plan_job(spec, data, template, prompts=prompts, progress=progress, watch=chains.add)
    is_sound = np.ones(plan.num_rows, dtype=bool)
    is_sound[list(plan.errors)] = False
    sound = np.flatnonzero(is_sound)
    tree = PromptTree.of(chains.build(), cuts, plan.text_bytes, sound)
    read_texts = _reader(data, template, prompts)
    counted = count_tree(tree, read_texts, prompts.count, np.random.default_rng(0))
    study = study_prompts(tree, counted.tokens)
    planned = tree.positions_of(plan.order.rows[is_sound[plan.order.rows]])
    ranks = np.empty(len(planned), dtype=np.int64)
    ranks[planned] = np.arange(len(planned))
    shared = np.append(study.depths, 0.0)[tree.shared_with_earlier(ranks)][planned]
    return JobStudy(plan, tree, counted, study, planned, shared, read_texts)


def _reader(data: InputData, template: RequestTemplate, prompts: PromptReader) -> ReadTexts:
    def read_texts(rows: IntArray) -> list[bytes]:
        values = data.read_rows(rows.tolist(), template.columns_used)
        return [
            prompts.text(template.render(row, row_number=number))
            for number, row in zip(rows.tolist(), values, strict=True)
        ]

    return read_texts


def _excerpt(text: bytes, start: int) -> str:
    """Some words from about there on; where they part is known to half a chunk only."""
    before = text[max(start - MOST_BACK_BYTES, 0) : start].split()
    if start and before and not text[start - 1 : start].isspace():
        start -= len(before[-1])
    shown = text[start : start + 8 * EXCERPT_CHARS].decode("utf-8", "ignore")
    words = " ".join(shown.split())
    return words if len(words) <= EXCERPT_CHARS else words[: EXCERPT_CHARS - 1] + "…"
