"""What the daemon tells the scheduler inside an engine about a row (design section 2)."""

from __future__ import annotations

import json

from batchrun.daemon.active_job import ActiveJob
from batchrun.types import HINT_KEY, HINT_VERSION

MAX_NODES = 8
HINTED_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Hinter:
    """Writes hints. Ranks count all rows sent by this daemon, so they compare over jobs."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_rank = 0

    def add_hint(self, body: dict[str, object], job: ActiveJob, row: int, nonce: str) -> None:
        """Put the row's hint into its body, where the endpoint has a place for it."""
        if job.spec.endpoint not in HINTED_ENDPOINTS:
            return
        rank = self._next_rank
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
        }
        given = body.get("vllm_xargs")
        others = given if isinstance(given, dict) else {}
        body["vllm_xargs"] = {**others, HINT_KEY: json.dumps(hint, separators=(",", ":"))}


def _nodes(job: ActiveJob, row: int, rank: int) -> list[list[int]]:
    """[node, rows still to come behind this one, rank of the next] from the root downwards.

    Of a long path the outermost node and the innermost ones are told.
    """
    position = job.queue.position_of(row)
    path = job.nodes.path(position)
    if len(path) > MAX_NODES:
        path = [path[0], *path[1 - MAX_NODES :]]
    told: list[list[int]] = []
    for node in path:
        end = int(job.nodes.ends[node])
        to_come = int(job.pending_from[position + 1] - job.pending_from[end])
        told.append([node, to_come, rank + 1 if to_come else rank])
    return told
