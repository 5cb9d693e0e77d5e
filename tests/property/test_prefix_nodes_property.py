"""The nodes of a planned order are exactly the prefixes that two or more rows share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchrun.pool.radix_tree import NO_NODE, build_radix_tree

words = st.lists(st.lists(st.sampled_from("ab"), max_size=5).map("".join), max_size=30)


def shared_with_previous(ordered: list[str]) -> list[int]:
    shared = [0] if ordered else []
    for one, other in pairwise(ordered):
        length = min(len(one), len(other))
        differ = (i for i in range(length) if one[i] != other[i])
        shared.append(next(differ, length))
    return shared


@given(words)
def test_nodes_are_the_branching_prefixes_with_all_their_rows(texts: list[str]) -> None:
    ordered = sorted(texts)
    nodes = build_radix_tree(np.array(shared_with_previous(ordered), dtype=np.int64))

    found = {
        (int(start), int(end), int(depth))
        for start, end, depth in zip(nodes.starts, nodes.ends, nodes.depths, strict=True)
    }
    pairs = shared_with_previous(ordered)
    expected = set()
    for position in range(1, len(ordered)):
        depth = pairs[position]
        if depth:
            prefix = ordered[position][:depth]
            places = [i for i, text in enumerate(ordered) if text.startswith(prefix)]
            expected.add((places[0], places[-1] + 1, depth))
    assert found == expected


@given(words)
def test_a_path_leads_from_the_widest_to_the_deepest_node(texts: list[str]) -> None:
    ordered = sorted(texts)
    nodes = build_radix_tree(np.array(shared_with_previous(ordered), dtype=np.int64))

    for position in range(len(ordered)):
        path = nodes.path(position)
        assert all(nodes.starts[k] <= position < nodes.ends[k] for k in path)
        depths = [int(nodes.depths[k]) for k in path]
        assert depths == sorted(set(depths))
        around = [
            k for k in range(len(nodes.starts)) if nodes.starts[k] <= position < nodes.ends[k]
        ]
        assert sorted(path) == around
        assert (nodes.innermost[position] == NO_NODE) == (not path)
