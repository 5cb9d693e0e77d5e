"""A job looked at as a whole: Preble's prompt study, hit rates, and the order of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchrun.cli.inspect_outputs import OutputEstimate
from batchrun.cli.inspect_tokens import CountedTree, ReadTexts, count_tree
from batchrun.inputs import InputData, RequestTemplate
from batchrun.inputs.prompts import PromptReader
from batchrun.jobspec import JobSpec
from batchrun.planning import JobPlan, plan_job
from batchrun.pool.chains import IntArray
from batchrun.pool.expected_hits import RowWalk, expected_hits
from batchrun.pool.piece_codes import PieceCoder
from batchrun.pool.prefix_nodes import NO_NODE
from batchrun.pool.prompt_study import PromptStudy, servable_tokens, study_prompts
from batchrun.pool.prompt_tree import FloatArray, PromptTree
from batchrun.types import ProgressSink

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
    coder = PieceCoder()
    plan = plan_job(spec, data, template, prompts=prompts, progress=progress, watch=coder.add)
    is_sound = np.ones(plan.num_rows, dtype=bool)
    is_sound[list(plan.errors)] = False
    sound = np.flatnonzero(is_sound)
    tree = PromptTree.of(plan.chains, coder.build(), plan.text_bytes, sound)
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
    """Some words from about there on; where they part is known to half a piece only."""
    before = text[max(start - MOST_BACK_BYTES, 0) : start].split()
    if start and before and not text[start - 1 : start].isspace():
        start -= len(before[-1])
    shown = text[start : start + 8 * EXCERPT_CHARS].decode("utf-8", "ignore")
    words = " ".join(shown.split())
    return words if len(words) <= EXCERPT_CHARS else words[: EXCERPT_CHARS - 1] + "…"
