"""The jobs that hit rates are measured on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from batchrun.simulator.offline_jobs import JobShape, LogNormalTokens
from benchmarks.job_shapes import ShapedJob, loogle, nextqa, qmsum, toolbench
from benchmarks.scenarios import Job, Order, draw_job, draw_token_ids

STRADDLING_QUESTION_TOKENS = (15, 2_000)
ALL_FOUR = "all four"

JOBS: Mapping[str, Callable[[], Sequence[ShapedJob]]] = {
    "loogle": lambda: [loogle()],
    "toolbench": lambda: [toolbench()],
    "nextqa": lambda: [nextqa(60)],
    "qmsum": lambda: [qmsum(40)],
    ALL_FOUR: lambda: [loogle(), toolbench(), nextqa(30), qmsum(20)],
}
"""What runs at the same time, by name; more rows than the daemon's window holds, and so few that
one core runs them on the virtual engine in under a minute."""


def mixed_job(num_documents: int, seed: int = 0) -> Job:
    """Documents of 500 to 28,000 tokens, most of them short, with answers of 50 to 200 tokens."""
    shape = JobShape(
        num_documents=num_documents,
        document_tokens=LogNormalTokens(8.3, 1.1, (500, 28_000)),
        questions=(4, 12),
        output_tokens=(50, 200),
    )
    return draw_job(shape, seed, Order.SHUFFLED)


def straddling_job(seed: int, num_documents: int = 60) -> Job:
    """A mixed job with questions of up to 2,000 tokens: rows about one document differ so much in
    length that bounds of buckets fall between them."""
    rng = random.Random(seed)
    job = mixed_job(num_documents, seed)
    rows = [
        replace(row, question=draw_token_ids(rng, rng.randint(*STRADDLING_QUESTION_TOKENS)))
        for row in job.rows
    ]
    return Job(job.documents, rows)
