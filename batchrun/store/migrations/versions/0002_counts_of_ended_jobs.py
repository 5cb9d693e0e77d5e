"""Jobs that have ended keep their counts, and the instant when their results were removed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

COUNTS = (
    "num_completed",
    "num_failed",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
)
TERMINAL = ("completed", "failed", "cancelled", "expired")

jobs = sa.table("jobs", sa.column("seq"), sa.column("state"), *map(sa.column, COUNTS))
results = sa.table("results", sa.column("job_seq"), sa.column("ok"), *map(sa.column, COUNTS[2:]))


def upgrade() -> None:
    """Add the columns, and count the results of the jobs that have ended."""
    for name in COUNTS:
        op.add_column("jobs", sa.Column(name, sa.BigInteger))
    op.add_column("jobs", sa.Column("results_removed_at", sa.Float))
    connection = op.get_bind()
    ended = sa.select(jobs.c.seq).where(jobs.c.state.in_(TERMINAL))
    for seq in connection.execute(ended).scalars().all():
        completed = sa.func.coalesce(sa.func.sum(results.c.ok), 0)
        tokens = (sa.func.coalesce(sa.func.sum(results.c[name]), 0) for name in COUNTS[2:])
        counting = sa.select(completed, sa.func.count() - completed, *tokens)
        found = connection.execute(counting.where(results.c.job_seq == seq)).one()
        values = dict(zip(COUNTS, found, strict=True))
        connection.execute(sa.update(jobs).where(jobs.c.seq == seq).values(**values))
