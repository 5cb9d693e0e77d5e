"""The pool: the whole of a job known at once, and the order that wastes no prefix."""

from batchrun.pool.prefix_key import CHUNK_BYTES, chunk_chain, salt_of
from batchrun.pool.prefix_nodes import PrefixNodes, find_prefix_nodes
from batchrun.pool.prefix_order import PrefixOrder, order_by_prefix
from batchrun.pool.row_queue import RowQueue

__all__ = [
    "CHUNK_BYTES",
    "PrefixNodes",
    "PrefixOrder",
    "RowQueue",
    "chunk_chain",
    "find_prefix_nodes",
    "order_by_prefix",
    "salt_of",
]
