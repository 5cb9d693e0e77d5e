"""A row's hint as the cache reads it, and what rows and prefix nodes stand for in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batchrun.cache.segments import common_blocks


class NodeUse(Protocol):
    """One prefix node in a hint."""

    @property
    def node(self) -> int:
        """Its id, unique within the job and epoch."""
        ...

    @property
    def num_rows_to_come(self) -> int:
        """Rows of the node that come after this row and have not been sent."""
        ...

    @property
    def next_rank(self) -> int:
        """The rank of the first of them; without meaning when there are none."""
        ...


class RowUse(Protocol):
    """A row's hint."""

    @property
    def epoch(self) -> int:
        """The start of the daemon that sent it; starts count upwards."""
        ...

    @property
    def job(self) -> str:
        """The job's id."""
        ...

    @property
    def row(self) -> int:
        """The row's number in its job."""
        ...

    @property
    def rank(self) -> int:
        """Its place in the order planned for this engine, over all jobs."""
        ...

    @property
    def nodes(self) -> Sequence[NodeUse]:
        """Its prefix nodes, the outermost first."""
        ...


class AnnouncedRow:
    """A row that is announced and not finished. Children of `n > 1` share it."""

    __slots__ = ("chain", "job", "rank", "requests", "row")

    def __init__(self, job: HintedJob, hint: RowUse, chain: Sequence[bytes]) -> None:
        self.job, self.row, self.rank = job, hint.row, hint.rank
        self.chain = tuple(chain)
        self.requests: set[str] = set()


class PrefixNode:
    """A prefix node with rows to come: it covers `chain[:num_blocks]`.

    `branch` is what lies below it on the way to the row that announced it first. Until a row comes
    by another branch, where the node ends is unknown: the innermost node of a row is then taken to
    cover the whole row, an outer one nothing (the inner one's values stand for it).
    """

    __slots__ = ("branch", "chain", "is_forked", "num_blocks")

    def __init__(self, branch: object, chain: Sequence[bytes]) -> None:
        self.branch, self.chain = branch, chain
        self.num_blocks = 0
        self.is_forked = False

    def learn(self, branch: object, chain: Sequence[bytes]) -> int:
        """Where the node ends, in blocks, now that a row came by this branch."""
        if branch == self.branch:
            return self.num_blocks
        bound = self.num_blocks if self.is_forked else len(self.chain)
        self.is_forked = True
        return common_blocks(self.chain, chain, 0, min(bound, len(chain)))


class HintedJob:
    """The rows and nodes of one job; `is_counted` is whether its lease holds."""

    __slots__ = ("is_counted", "lease_end_s", "name", "nodes", "rows")

    def __init__(self, name: str) -> None:
        self.name = name
        self.lease_end_s = 0.0
        self.is_counted = True
        self.rows: dict[int, AnnouncedRow] = {}
        self.nodes: dict[int, PrefixNode] = {}
