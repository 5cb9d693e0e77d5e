"""What the daemon tells the scheduler inside an engine about a row (design section 2)."""

from __future__ import annotations

import json

from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.row_costs import expected_output_tokens
from batchrun.types import HINT_KEY, HINT_VERSION

MAX_NODES = 8
URGENT_LEAD = 1 << 20
"""An urgent row's rank lies so far ahead: before every row that waits in an engine."""
HINTED_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Hinter:
    """Writes hints. Ranks count all rows sent by this daemon, so they compare over jobs."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_rank = URGENT_LEAD

    def add_hint(
        self,
        body: dict[str, object],
        job: ActiveJob,
        row: int,
        nonce: str,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Put the row's hint into its body, where the endpoint has a place for it."""
        if job.spec.endpoint not in HINTED_ENDPOINTS:
            return
        rank = self._next_rank - (URGENT_LEAD if is_urgent else 0)
        self._next_rank += 1
        hint = {
            "v": HINT_VERSION,
            "nonce": nonce,
            "epoch": self._epoch,
            "job": job.record.id,
            "row": row,
            "class": "offline",
            "rank": rank,
            "nodes": _nodes(job, row, rank),
            "output": expected_output_tokens(job.spec, job.counts),
        }
        given = body.get("vllm_xargs")
        others = given if isinstance(given, dict) else {}
        body["vllm_xargs"] = {**others, HINT_KEY: json.dumps(hint, separators=(",", ":"))}


def _nodes(job: ActiveJob, row: int, rank: int) -> list[list[int]]:
    """[node, rows still to come behind this one, rank of the next] from the root downwards.

    Of a long path the outermost node and the innermost ones are told.
    """
    path = job.queue.path_of(row)
    if len(path) > MAX_NODES:
        path = [path[0], *path[1 - MAX_NODES :]]
    to_come = [job.queue.num_to_come(node) for node in path]
    return [[node, num, rank + 1 if num else rank] for node, num in zip(path, to_come, strict=True)]
