"""Orders of rows, and the jobs that they are compared on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from batchrun.hints import RowHint, read_hint
from batchrun.simulator.virtual.setup import NONCE
from benchmarks.data import TOOLS, VIDEOS
from benchmarks.data.derive import nextqa, toolbench
from benchmarks.hit_orders import (
    BASELINES,
    LPM_WINDOW,
    blend,
    lexicographic,
    longest_prefix_match,
    pool_job,
    submission,
)
from benchmarks.job_shapes import ShapedJob, joined, prompt_of
from benchmarks.job_shapes import nextqa as nextqa_job
from benchmarks.job_shapes import toolbench as toolbench_job
from benchmarks.row_feeds import daemon_of
from benchmarks.scenarios import Job, JobRow, Order, TokenIds

SETTING = (1, 1_000)
"""A seed, and the blocks of the cache."""
REAL_DATA = Path(__file__).parents[3] / "shared" / "datasets"

TREE = (
    [64, 128, 192, 256],
    [((0, 1), 20, 4), ((0, 2), 30, 5), ((0, 1), 40, 6), ((3,), 50, 7), ((0, 2), 60, 8)],
)
"""Two lists below one system prompt, and a row with a prefix of its own."""


def job_of(documents: str, document_tokens: int = 160) -> Job:
    """A row for each letter, about the document of that letter."""
    names = sorted(set(documents))
    contents = [np.full(document_tokens, ord(name), dtype=np.uint32) for name in names]
    question = [np.full(8, 1_000 + i, dtype=np.uint32) for i in range(len(documents))]
    rows = [JobRow(i, names.index(name), question[i], 4) for i, name in enumerate(documents)]
    return Job(contents, rows)


def documents_of(job: Job) -> str:
    """The letters of `job_of`."""
    return "".join(chr(int(job.documents[row.document][0])) for row in job.rows)


def shared_tokens(one: TokenIds, other: TokenIds) -> int:
    """Leading tokens that two prompts have in common."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size


def hints_of(jobs: Sequence[Job]) -> list[RowHint]:
    """The hints of all rows, as the scheduler reads them."""
    arrivals = daemon_of([pool_job(job) for job in jobs]).ports[0].take_due(0.0)
    hints = [read_hint(arrival.hint, NONCE) for arrival in arrivals]
    return [hint for hint in hints if isinstance(hint, RowHint)]


@pytest.mark.parametrize("name", BASELINES)
def test_an_order_loses_and_doubles_no_row(name: str) -> None:
    job = joined([ShapedJob("tree", *TREE).draw(seed, Order.SHUFFLED) for seed in range(3)])
    numbers = [row.number for row in BASELINES[name](job, *SETTING).rows]

    assert sorted(numbers) == list(range(15))


def test_rows_share_exactly_the_segments_that_their_paths_share() -> None:
    rows = ShapedJob("tree", *TREE).draw(0, Order.GROUPED)
    prompts = [prompt_of(rows, row) for row in rows.rows]

    assert [len(prompt) for prompt in prompts] == [212, 286, 232, 306, 316]
    assert shared_tokens(prompts[0], prompts[2]) == 64 + 128
    assert shared_tokens(prompts[1], prompts[4]) == 64 + 192
    assert shared_tokens(prompts[0], prompts[1]) == 64
    assert shared_tokens(prompts[0], prompts[3]) == 0


def test_jobs_of_different_names_share_no_text() -> None:
    one, other = (ShapedJob(name, *TREE).draw(0, Order.GROUPED) for name in ("one", "other"))
    prompts = [prompt_of(job, job.rows[0]) for job in (one, other)]

    assert shared_tokens(*prompts) < 16


def test_submission_undoes_the_shuffle() -> None:
    shuffled = ShapedJob("tree", *TREE).draw(0, Order.SHUFFLED)

    assert [row.number for row in submission(shuffled, *SETTING).rows] == [0, 1, 2, 3, 4]


def test_lexicographic_sorts_by_tokens() -> None:
    assert documents_of(lexicographic(job_of("cabcab"), *SETTING)) == "aabbcc"


def test_the_longest_prefix_in_the_cache_goes_next() -> None:
    assert documents_of(longest_prefix_match(job_of("abcabc"), *SETTING)) == "aabbcc"


def test_a_row_beyond_the_window_is_not_seen() -> None:
    others = "".join(chr(200 + i) for i in range(LPM_WINDOW))
    order = documents_of(longest_prefix_match(job_of(f"a{others}a"), *SETTING))

    assert order == f"a{others[0]}a{others[1:]}"


def test_what_the_cache_cannot_hold_is_not_matched() -> None:
    # Each prompt has ten full blocks: once another row has run, `a` is gone.
    others = "".join(chr(200 + i) for i in range(LPM_WINDOW))
    job = job_of(f"a{others}a")
    order = documents_of(longest_prefix_match(job, 0, 10))

    assert order == f"a{others}a"


def test_the_blend_takes_whole_documents_from_both_ends_of_the_density() -> None:
    # The fewer rows share a document, the more of its work is compute.
    job = job_of("abccccdddddd")

    assert documents_of(blend(job, *SETTING)) == "bddddddacccc"


def test_hints_name_every_prefix_node_and_count_the_rows_to_come() -> None:
    hints = hints_of([ShapedJob("tree", *TREE).draw(0, Order.GROUPED)])
    root = [hint.nodes[0].num_rows_to_come for hint in hints if len(hint.nodes) == 2]

    assert sorted(len(hint.nodes) for hint in hints) == [0, 2, 2, 2, 2]
    assert root == [3, 2, 1, 0]
    assert [hint.rank - hints[0].rank for hint in hints] == [0, 1, 2, 3, 4]


def test_hints_of_jobs_that_run_together_count_apart() -> None:
    jobs = [ShapedJob("tree", *TREE).draw(seed, Order.SHUFFLED) for seed in (0, 1)]
    hints = hints_of(jobs)

    assert {hint.job for hint in hints} == {"job-0", "job-1"}
    for name in ("job-0", "job-1"):
        root = [h.nodes[0].num_rows_to_come for h in hints if h.job == name and h.nodes]
        assert root == [3, 2, 1, 0]


def test_the_tables_have_the_rows_of_the_data_sets() -> None:
    tools, videos = toolbench_job(), nextqa_job()
    lists = {path for path, _, _ in tools.rows}

    assert (len(tools.rows), len(lists), len(tools.tokens)) == (1_358, 1_111, 4_597)
    assert len({path[0] for path in lists}) == 1
    assert len(videos.draw(0, Order.GROUPED).rows) > 4_900


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the real data sets are not on this machine")
def test_the_committed_tables_are_those_of_the_data() -> None:
    tools, videos = (json.loads(path.read_text()) for path in (TOOLS, VIDEOS))
    tools.pop("source")
    videos.pop("source")

    assert toolbench(REAL_DATA / "toolbench") == tools
    assert nextqa(REAL_DATA) == videos
