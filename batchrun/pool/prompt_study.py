"""The prompt study of Preble's section 3 (arXiv 2407.00023), for any job.

Its second paragraph: the study covers "prompt and decoding (output) length, amount of sharing in a
prompt, key portion size in a prompt, and number of requests sharing a key portion. We define the
'key portion' of a request as the deepest node in a path that has more tokens than the sum of its
predecessors." The tree stands for "an infinite prefix cache" (first paragraph).

What table 1 calls "shared prefix in prompt" is what that cache holds when a request comes: its
VideoQA has 8.6 requests to a video and (88 %, 32 %), which is 1 - 1/8.6 with its deviation. A path
ends with what the request has for itself: VideoQA's key portions take (99 %, 0.2 %) of a prompt,
those of videos with one request too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchrun.pool.chains import IntArray
from batchrun.pool.prefix_nodes import NO_NODE
from batchrun.pool.prompt_tree import FloatArray, PromptTree, nearest_marked, path_sums


@dataclass(frozen=True, slots=True, eq=False)
class TreeTokens:
    """Tokens of each node's own text, and of each position's leaf."""

    nodes: FloatArray
    leaves: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class PromptStudy:
    """One value for each position of the tree, in tokens.

    `shared` is the prefix that a row earlier in the input has, `common` the one that any other row
    has. `key_nodes` is the node that is the key portion, or NO_NODE where that is the leaf;
    `key_portions` its tokens. `rows_per_key` has one value for each distinct key portion: the rows
    whose prompts hold it. `depths` are the tokens of each node with those around it.
    """

    prompts: FloatArray
    shared: FloatArray
    common: FloatArray
    key_nodes: IntArray
    key_portions: FloatArray
    rows_per_key: IntArray
    depths: FloatArray

    @property
    def shared_shares(self) -> FloatArray:
        """Share of each prompt (0 to 1) that an earlier row has."""
        return _shares(self.shared, self.prompts)

    @property
    def common_shares(self) -> FloatArray:
        """Share of each prompt (0 to 1) that any other row has."""
        return _shares(self.common, self.prompts)

    @property
    def key_shares(self) -> FloatArray:
        """Share of each prompt (0 to 1) that is its key portion."""
        return _shares(self.key_portions, self.prompts)


def study_prompts(tree: PromptTree, tokens: TreeTokens) -> PromptStudy:
    """Preble's figures for every row. O(positions x levels of the tree), in numpy."""
    parents, innermost = tree.nodes.parents, tree.innermost
    depths = path_sums(parents, tokens.nodes)
    above = np.append(depths, 0.0)[innermost]
    key_nodes, key_portions = _key_portions(tree, tokens, depths)
    node_keys = np.unique(key_nodes[key_nodes != NO_NODE])
    sizes = (tree.nodes.ends - tree.nodes.starts)[node_keys]
    num_leaf_keys = int(np.count_nonzero(key_nodes == NO_NODE))
    return PromptStudy(
        prompts=above + tokens.leaves,
        shared=np.append(depths, 0.0)[tree.shared_with_earlier(tree.rows)],
        common=above,
        key_nodes=key_nodes,
        key_portions=key_portions,
        rows_per_key=np.concatenate((sizes, np.ones(num_leaf_keys, dtype=np.int64))),
        depths=depths,
    )


def servable_tokens(found: FloatArray, prompts: FloatArray, block_tokens: int) -> FloatArray:
    """What vLLM takes from its prefix cache of `found` tokens: whole blocks, and never the last
    token of a prompt, which is computed for its logits."""
    blocks = np.minimum(found, np.maximum(prompts - 1, 0)) // block_tokens
    servable: FloatArray = blocks * block_tokens
    return servable


def _key_portions(
    tree: PromptTree, tokens: TreeTokens, depths: FloatArray
) -> tuple[IntArray, FloatArray]:
    """(node or NO_NODE for the leaf, tokens) of each position's key portion."""
    is_larger = tokens.nodes > depths - tokens.nodes
    key_of_node = np.append(nearest_marked(tree.nodes.parents, is_larger), NO_NODE)
    is_leaf = tokens.leaves > np.append(depths, 0.0)[tree.innermost]
    keys = np.where(is_leaf, NO_NODE, key_of_node[tree.innermost])
    portions = np.where(keys == NO_NODE, tokens.leaves, np.append(tokens.nodes, 0.0)[keys])
    return keys, portions


def _shares(part: FloatArray, whole: FloatArray) -> FloatArray:
    shares: FloatArray = part / np.maximum(whole, 1e-9)
    return shares
