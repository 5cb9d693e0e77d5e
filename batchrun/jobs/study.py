"""A job looked at as a whole: Preble's prompt study, hit rates, and the order of a run.

Tokens of the prompt tree are counted on a sample of its rows and estimated from bytes for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchrun.jobs.expected_answers import OutputEstimate, num_choices, output_limit
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.prompts.image_tokens import show_images
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
from batchrun.types import ProgressSink

SAMPLE_ROWS = 2_048
SAMPLE_BYTES = 6 << 20
"""Most text that is tokenised; a few seconds."""
SEGMENT_BYTES = 256 << 10
"""Of a longer segment only the beginning is tokenised."""
CONTEXT_BYTES = 128
"""Text before a segment that is tokenised with it: a cut within a token counts on both sides."""
ROWS_PER_READ = 128
MAX_LEVEL = 4
"""Nodes this deep or deeper are taken to be alike in bytes per token; leaves are level 0."""

Values = FloatArray | IntArray
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
    tree: PromptTree, read_texts: ReadTexts, count: TokenCounter | None, rng: np.random.Generator
) -> CountedTree:
    """Tokens of every node and leaf. What no sampled row has gets the bytes per token of what is
    as deep in the tree. Without `count`, `DEFAULT_BYTES_PER_TOKEN` holds for all."""
    num_nodes, parents = tree.nodes.num_nodes, tree.nodes.parents
    depths = np.minimum(path_sums(parents, np.ones(num_nodes)), MAX_LEVEL).astype(np.int64)
    # Nodes first, then the leaf of each position; a leaf is of level 0.
    levels = np.concatenate((depths, np.zeros(len(tree.rows), dtype=np.int64)))
    tokens = np.full(len(levels), np.nan)
    sums, num_sampled = np.zeros((MAX_LEVEL + 1, 2)), 0
    for position, text in () if count is None else _sampled_texts(tree, read_texts, rng):
        if sums[:, 0].sum() >= SAMPLE_BYTES:
            break
        num_sampled += 1
        start = 0
        for part in (*tree.nodes.path(position), num_nodes + position):
            end = int(tree.depth_bytes[part]) if part < num_nodes else len(text)
            if np.isnan(tokens[part]):
                num_bytes, num_tokens = _counted(text, start, end, count)
                sums[levels[part]] += num_bytes, num_tokens
                tokens[part] = num_tokens * (end - start) / max(num_bytes, 1)
            start = end
    sizes = np.concatenate((tree.node_bytes, tree.leaf_bytes))
    tokens = np.where(np.isnan(tokens), sizes / _bytes_per_token(sums)[levels], tokens)
    nodes, leaves = np.split(tokens, [num_nodes])
    total = float(np.append(path_sums(parents, nodes), 0.0)[tree.innermost].sum() + leaves.sum())
    mean = float(tree.text_bytes.sum()) / total if total else DEFAULT_BYTES_PER_TOKEN
    return CountedTree(TreeTokens(nodes, leaves), mean, num_sampled, int(sums[:, 0].sum()))


def _sampled_texts(
    tree: PromptTree, read_texts: ReadTexts, rng: np.random.Generator
) -> Iterator[tuple[int, bytes]]:
    """(position, text) of rows spread over the tree, in random order."""
    num_rows = len(tree.rows)
    spread = np.linspace(0, num_rows - 1, min(SAMPLE_ROWS, num_rows))
    positions = rng.permutation(np.unique(spread.round().astype(np.int64)))
    for start in range(0, len(positions), ROWS_PER_READ):
        part = positions[start : start + ROWS_PER_READ]
        yield from zip(part.tolist(), read_texts(tree.rows[part]), strict=True)


def _counted(text: bytes, start: int, end: int, count: TokenCounter | None) -> tuple[int, int]:
    """(bytes tokenised, their tokens) of a segment of a text."""
    stop = min(end, start + SEGMENT_BYTES)
    if count is None or stop <= start:
        return 0, 0
    before = max(start - CONTEXT_BYTES, 0)
    return stop - start, count(text[before:stop]) - count(text[before:start])


def _bytes_per_token(sums: FloatArray) -> FloatArray:
    """By level, from its bytes and tokens; where nothing was counted, that of all together."""
    num_bytes, num_tokens = sums.sum(axis=0)
    overall = num_bytes / num_tokens if num_tokens else DEFAULT_BYTES_PER_TOKEN
    ratios = np.full(len(sums), overall)
    np.divide(sums[:, 0], sums[:, 1], out=ratios, where=sums[:, 1] > 0)
    return ratios


EXCERPT_CHARS = 60
MOST_BACK_BYTES = 24
MAX_STRETCHES = 20
PERCENTILES = tuple(range(101))


@dataclass(frozen=True, slots=True)
class KvSize:
    """The KV cache of one engine, the smallest where there are several.

    `tokens` is None while unknown. The sources say in words where each figure is from.
    `most_tokens` are the largest engine's, infinite while any engine's are unknown.
    """

    tokens: int | None
    source: str
    block_tokens: int
    block_source: str
    most_tokens: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """One of Preble's figure 4: `values` of all rows, or of all key portions. Shares are 0 to 1."""

    title: str
    values: Values
    is_share: bool = False

    @property
    def percentiles(self) -> list[float]:
        """The values below which 0, 1, ... 100 per cent lie."""
        return [float(value) for value in np.percentile(self.values, PERCENTILES)]


@dataclass(frozen=True, slots=True, eq=False)
class JobStudy:
    """What is known of a job before it runs; arrays of `study` go by position in `tree`.

    `planned` has the positions in the order of a run, `planned_shared[i]` the tokens that the i-th
    of them shares with a row before it.
    """

    spec: JobSpec
    plan: JobPlan
    tree: PromptTree
    counted: CountedTree
    study: PromptStudy
    planned: IntArray
    planned_shared: FloatArray
    read_texts: ReadTexts

    def distributions(self, outputs: OutputEstimate) -> dict[str, Distribution]:
        """Preble's figure 4 (section 3), and the lengths of table 1; outputs where known by row."""
        study = self.study
        shared, keys = study.shares(study.shared), study.shares(study.key_portions)
        found = {
            "prompt_tokens": Distribution("prompt tokens", study.prompts),
            "shared_share": Distribution("shared share of a prompt", shared, True),
            "key_portion_share": Distribution("key portion of a prompt", keys, True),
            "rows_per_key_portion": Distribution("rows per key portion", study.rows_per_key),
        }
        tokens = outputs.tokens[self.tree.rows]
        known = ~np.isnan(tokens) & (tokens > 0)
        if known.any():
            ratios = study.prompts[known] / tokens[known]
            found["output_tokens"] = Distribution("output tokens", tokens[known])
            found["prompt_to_output_ratio"] = Distribution("prompt tokens per output token", ratios)
        return {name: each for name, each in found.items() if len(each.values)}

    def figures(self, outputs: OutputEstimate, kv: KvSize) -> dict[str, Any]:
        """All figures by the names of `inspect --json`, flat but for the order and the
        distributions. Shares and hit rates are 0 to 1."""
        errors = self.plan.errors
        distributions = self.distributions(outputs)
        ratio = distributions.get("prompt_to_output_ratio")
        return {
            "name": self.spec.name,
            "endpoint": self.spec.endpoint,
            "rows": self.plan.num_rows,
            "rows_with_template_errors": len(errors),
            "first_error": next((f"row {row}: {e.message}" for row, e in errors.items()), None),
            **self._study_figures(),
            "output_tokens_mean": outputs.mean,
            "output_tokens_std": outputs.std,
            "output_tokens_source": outputs.source,
            "max_output_tokens": output_limit(self.spec),
            "prompt_to_output_ratio_mean": None if ratio is None else float(ratio.values.mean()),
            **self._hit_figures(outputs, kv),
            "prefix_groups": self.plan.num_groups,
            "length_buckets": 1,
            "order": list(self._stretches()),
            "distributions": {name: each.percentiles for name, each in distributions.items()},
            "output_path": self.spec.output.path,
        }

    def _study_figures(self) -> dict[str, Any]:
        study, counted = self.study, self.counted
        total, shared = float(study.prompts.sum()), float(study.shared.sum())
        return {
            "prompt_tokens_total": total,
            "prompt_tokens_computed": total - float(self.planned_shared.sum()),
            **_mean_and_std("prompt_tokens", study.prompts),
            "bytes_per_token": counted.bytes_per_token,
            "rows_tokenised": counted.num_rows,
            "bytes_tokenised": counted.num_bytes,
            **_mean_and_std("shared_share", study.shares(study.shared)),
            "shared_share_of_tokens": shared / total if total else 0.0,
            **_mean_and_std("common_share", study.shares(study.common)),
            **_mean_and_std("key_portion_share", study.shares(study.key_portions)),
            **_mean_and_std("rows_per_key_portion", study.rows_per_key),
            "key_portions": len(study.rows_per_key),
        }

    def _hit_figures(self, outputs: OutputEstimate, kv: KvSize) -> dict[str, Any]:
        """What a prefix cache serves: one that never forgets; one of `kv`, rows in the order of a
        run with batchrun's eviction; and that one, rows as the input has them with LRU."""
        prompts = self.study.prompts[self.planned]
        best = servable_tokens(self.planned_shared, prompts, kv.block_tokens)
        expected, num_too_large = self._rate(self.planned, outputs, kv, drops_used=True)
        as_written, _ = self._rate(np.argsort(self.tree.rows), outputs, kv, drops_used=False)
        return {
            "best_hit_rate": float(best.sum() / prompts.sum()) if len(prompts) else 0.0,
            "block_tokens": kv.block_tokens,
            "block_tokens_source": kv.block_source,
            "kv_tokens": kv.tokens,
            "kv_tokens_source": kv.source,
            "expected_hit_rate": expected,
            "expected_hit_rate_as_written": as_written,
            "rows_larger_than_kv": num_too_large,
        }

    def _rate(
        self, order: IntArray, outputs: OutputEstimate, kv: KvSize, *, drops_used: bool
    ) -> tuple[float | None, int]:
        """(share of the prompt tokens of the rows that fit the cache, rows that do not); None where
        the size is unknown, or no row fits."""
        if kv.tokens is None:
            return None, 0
        tree, tokens = self.tree, self.counted.tokens
        own = tokens.leaves + outputs.filled[tree.rows] / num_choices(self.spec.request)
        walk = RowWalk(tree.innermost[order], own[order], tree.nodes.parents, tokens.nodes)
        found = expected_hits(walk, kv.tokens, drops_used=drops_used)
        fits = ~np.isnan(found)
        prompts = self.study.prompts[order][fits]
        hits = servable_tokens(found[fits], prompts, kv.block_tokens)
        rate = float(hits.sum() / prompts.sum()) if prompts.size else None
        return rate, int(np.count_nonzero(~fits))

    def _stretches(self) -> Iterator[dict[str, Any]]:
        """The first stretches of the order: rows that run one after the other and have the same
        key portion, whose text `begins` so. Rows that have theirs for themselves stand together.

        `shared_tokens` of the `prompt_tokens` are those of prefixes that a row before has. Reads a
        row of each.
        """
        tree, keys = self.tree, self.study.key_nodes[self.planned]
        bounds = np.append(np.flatnonzero(np.diff(keys, prepend=-2)), len(keys))
        bounds = bounds[: MAX_STRETCHES + 1]
        firsts = self.planned[bounds[:-1]]
        texts = self.read_texts(tree.rows[firsts]) if len(firsts) else []
        for index, (position, text) in enumerate(zip(firsts.tolist(), texts, strict=True)):
            places = slice(bounds[index], bounds[index + 1])
            node = int(self.study.key_nodes[position])
            above = tree.nodes.parents[node] if node != NO_NODE else tree.innermost[position]
            start = 0 if above == NO_NODE else int(tree.depth_bytes[above])
            yield {
                "begins": _excerpt(text, start),
                "is_shared": node != NO_NODE,
                "first_row": int(tree.rows[position]),
                "num_rows": int(bounds[index + 1] - bounds[index]),
                "prompt_tokens": float(self.study.prompts[self.planned[places]].sum()),
                "shared_tokens": float(self.planned_shared[places].sum()),
            }


def _mean_and_std(name: str, values: Values) -> dict[str, float]:
    mean, std = (float(values.mean()), float(values.std())) if len(values) else (0.0, 0.0)
    return {f"{name}_mean": mean, f"{name}_std": std}


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

    def read_texts(rows: IntArray) -> list[bytes]:
        values = data.read_rows(rows.tolist(), template.columns_used)
        return [
            prompts.text(template.render(row, row_number=number, folder=data.folder(number)))
            for number, row in zip(rows.tolist(), values, strict=True)
        ]

    counted = count_tree(tree, read_texts, prompts.count, np.random.default_rng(0))
    study = study_prompts(tree, counted.tokens)
    planned = tree.positions_of(plan.order.rows[is_sound[plan.order.rows]])
    ranks = np.empty(len(planned), dtype=np.int64)
    ranks[planned] = np.arange(len(planned))
    shared = np.append(study.depths, 0.0)[tree.shared_with_earlier(ranks)][planned]
    return JobStudy(spec, plan, tree, counted, study, planned, shared, read_texts)


def _excerpt(text: bytes, start: int) -> str:
    """Some words from about there on; where they part is known to half a chunk only."""
    before = text[max(start - MOST_BACK_BYTES, 0) : start].split()
    if start and before and not text[start - 1 : start].isspace():
        start -= len(before[-1])
    shown = show_images(text[start:])[: 8 * EXCERPT_CHARS].decode("utf-8", "ignore")
    words = " ".join(shown.split())
    return words if len(words) <= EXCERPT_CHARS else words[: EXCERPT_CHARS - 1] + "…"
