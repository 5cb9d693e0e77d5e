"""The prompt tree and Preble's study of it: against texts, by hand, and against a direct count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from direct_study import direct_figures
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.jobs.study import count_tree
from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainBuilder, IntArray
from batchrun.pool.prompt_study import (
    LEAST_BYTES,
    Cuts,
    PromptTree,
    TreeTokens,
    servable_tokens,
    study_prompts,
)
from batchrun.pool.radix_tree import NO_NODE, RadixTree


def text(seed: int, num_bytes: int) -> bytes:
    return np.random.default_rng(seed).integers(97, 123, num_bytes).astype(np.uint8).tobytes()


def tree_of(texts: Sequence[bytes], rows: Sequence[int] | None = None) -> PromptTree:
    cuts = Cuts()
    builder = ChainBuilder(0, cuts)
    builder.add(texts[:2])
    builder.add(texts[2:])
    lengths = np.array([len(each) for each in texts], dtype=np.int64)
    chosen = np.arange(len(texts)) if rows is None else np.array(rows, dtype=np.int64)
    return PromptTree.of(builder.build(), cuts, lengths, chosen)


def in_bytes(tree: PromptTree) -> TreeTokens:
    return TreeTokens(tree.node_bytes.astype(float), tree.leaf_bytes.astype(float))


def common_bytes(tree: PromptTree) -> dict[int, int]:
    """What each row shares with any other, by row."""
    depths = np.append(tree.depth_bytes, 0)[tree.innermost]
    return dict(zip(tree.rows.tolist(), depths.tolist(), strict=True))


@pytest.mark.parametrize("num_shared", [8, 20, 100, 250, 256, 300, 512])
def test_a_shared_beginning_is_known_to_half_a_short_chunk(num_shared: int) -> None:
    shared = text(0, num_shared)
    tree = tree_of([shared + text(seed, 700) for seed in (1, 2, 3)])

    for found in common_bytes(tree).values():
        assert abs(found - num_shared) <= LEAST_BYTES // 2


@pytest.mark.parametrize("num_shared", [1_000, 4_096, 5_000, 40_000])
def test_a_long_shared_beginning_is_known_to_a_64th_and_to_half_a_chunk(num_shared: int) -> None:
    shared = text(0, num_shared)
    tree = tree_of([shared + text(seed, 700) for seed in (1, 2, 3)])

    for found in common_bytes(tree).values():
        assert abs(found - num_shared) <= min(num_shared // 64 + 1, CHUNK_BYTES // 2)


def test_texts_that_begin_alike_by_less_than_the_first_cut_share_nothing() -> None:
    assert tree_of([b"same " + text(seed, 300) for seed in (1, 2)]).nodes.num_nodes == 0


def test_equal_rows_share_all_of_their_text() -> None:
    texts = [text(1, 301), text(2, 90), text(1, 301), text(2, 90)]
    assert common_bytes(tree_of(texts)) == {0: 301, 1: 90, 2: 301, 3: 90}


def test_a_row_that_is_the_beginning_of_another_is_shared_but_for_part_of_a_chunk() -> None:
    whole = text(1, 1_000)
    found = common_bytes(tree_of([whole[:600], whole, text(2, 500)]))
    assert found == {0: pytest.approx(600, abs=LEAST_BYTES // 2), 1: found[0], 2: 0}


def test_unrelated_rows_share_nothing_however_many_they_are() -> None:
    tree = tree_of([text(seed, 300) for seed in range(4_000)])
    assert tree.nodes.num_nodes == 0


def test_rows_that_cannot_run_do_not_count_and_there_may_be_no_other() -> None:
    texts = [text(1, 500), b"", text(1, 500)]
    assert common_bytes(tree_of(texts, rows=[0, 2])) == {0: 500, 2: 500}
    empty = tree_of([b""], rows=[])
    assert study_prompts(empty, in_bytes(empty)).prompts.size == 0


def nested_tree(first: int, second: int, leaves: Sequence[int]) -> tuple[PromptTree, TreeTokens]:
    """Three rows below one node, two of them below another within it."""
    nodes = RadixTree(
        starts=np.array([0, 0]),
        ends=np.array([3, 2]),
        depths=np.array([1, 2]),
        parents=np.array([NO_NODE, 0]),
        innermost=np.array([1, 1, 0]),
    )
    depths = np.array([first, first + second])
    lengths = np.append(depths, 0)[nodes.innermost] + np.array(leaves)
    tree = PromptTree(np.array([1, 2, 0]), lengths, nodes, depths)
    return tree, in_bytes(tree)


@pytest.mark.parametrize(
    ("first", "second", "leaves", "key_nodes", "rows_per_key"),
    [
        (100, 50, (10, 10, 10), [0, 0, 0], [3]),
        (100, 101, (10, 10, 10), [1, 1, 0], [2, 3]),
        (100, 101, (10, 202, 10), [1, NO_NODE, 0], [1, 2, 3]),
        (100, 100, (200, 200, 100), [0, 0, 0], [3]),
    ],
)
def test_a_key_portion_is_the_deepest_node_with_more_than_all_before_it(
    first: int, second: int, leaves: tuple[int, ...], key_nodes: list[int], rows_per_key: list[int]
) -> None:
    study = study_prompts(*nested_tree(first, second, leaves))
    assert study.key_nodes.tolist() == key_nodes
    assert sorted(study.rows_per_key.tolist()) == rows_per_key


def test_the_first_row_of_a_prefix_shares_only_what_is_around_it() -> None:
    study = study_prompts(*nested_tree(100, 50, (10, 10, 10)))
    # Rows 1, 2 and 0 stand at these positions: row 0 comes first, then the first of the inner node.
    assert study.shared.tolist() == [100, 150, 0]
    assert study.common.tolist() == [150, 150, 100]


def test_blocks_are_whole_and_the_last_token_is_computed() -> None:
    found, prompts = np.array([0.0, 31.9, 32.0, 64.0, 500.0]), np.array([64.0, 64, 64, 64, 640])
    assert servable_tokens(found, prompts, 16).tolist() == [0, 16, 32, 48, 496]


segments = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 60)), min_size=2)


@settings(max_examples=60, deadline=None)
@given(paths=segments)
def test_the_study_agrees_with_a_direct_count(paths: list[tuple[int, int, int]]) -> None:
    texts = [
        text(1 + one, 700) + text(10 + other, 500 * other) + text(100 + own, 2_000)
        for one, other, own in paths
    ]
    tree = tree_of(texts)
    study = study_prompts(tree, in_bytes(tree))
    counted = direct_figures([
        np.frombuffer(each, dtype=np.uint8).astype(np.uint32) for each in texts
    ])

    assert study.prompts.mean() == counted["prompt_tokens_mean"]
    assert study.shares(study.shared).mean() == pytest.approx(
        counted["shared_share_mean"], abs=0.02
    )
    assert study.shares(study.common).mean() == pytest.approx(
        counted["common_share_mean"], abs=0.02
    )
    assert study.shares(study.key_portions).mean() == pytest.approx(
        counted["key_portion_share_mean"], abs=0.02
    )
    assert study.rows_per_key.mean() == counted["rows_per_key_portion_mean"]


def test_tokens_are_counted_where_they_are_sampled_and_estimated_by_depth_elsewhere() -> None:
    shared = b"ab " * 400
    texts = [shared + b"word" * (50 + seed) + str(seed).encode() for seed in range(8)]
    tree = tree_of(texts)

    def read_texts(rows: IntArray) -> list[bytes]:
        return [texts[row] for row in rows.tolist()]

    def count(part: bytes) -> int:
        return part.count(b"a") + part.count(b"o")

    counted = count_tree(tree, read_texts, count, np.random.default_rng(0))
    study = study_prompts(tree, counted.tokens)
    by_row = dict(zip(tree.rows.tolist(), study.prompts.tolist(), strict=True))
    assert by_row == pytest.approx({row: count(each) for row, each in enumerate(texts)}, abs=1)
    plain = count_tree(tree, read_texts, None, np.random.default_rng(0))
    assert (plain.bytes_per_token, plain.num_rows) == (4.0, 0)
