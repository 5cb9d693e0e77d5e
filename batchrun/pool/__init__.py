"""The pool: the whole of a job known at once, and the order that wastes no prefix."""

from batchrun.pool.chain_sort import rows_with_prefix
from batchrun.pool.chains import ChainBuilder, ChainTable, IntArray
from batchrun.pool.completion import Completion
from batchrun.pool.deadlines import Outlook
from batchrun.pool.job_turns import JobTurns, Turn
from batchrun.pool.prefix_key import CHUNK_BYTES, chunk_chain, salt_of
from batchrun.pool.prefix_nodes import PrefixNodes, find_prefix_nodes
from batchrun.pool.prefix_order import PrefixOrder, add_rows, order_by_prefix
from batchrun.pool.row_queue import RowQueue
from batchrun.pool.window import Window

__all__ = [
    "CHUNK_BYTES",
    "ChainBuilder",
    "ChainTable",
    "Completion",
    "IntArray",
    "JobTurns",
    "Outlook",
    "PrefixNodes",
    "PrefixOrder",
    "RowQueue",
    "Turn",
    "Window",
    "add_rows",
    "chunk_chain",
    "find_prefix_nodes",
    "order_by_prefix",
    "rows_with_prefix",
    "salt_of",
]
