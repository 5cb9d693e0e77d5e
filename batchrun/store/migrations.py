"""The migrations that bring a store to the newest schema: added at the end, never changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations

COUNTS = (
    "num_completed",
    "num_failed",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
)
TERMINAL = ("completed", "failed", "cancelled", "expired")


def _create_first_schema(op: Operations) -> None:
    op.create_table(
        "jobs",
        _numbered("seq"),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False, index=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("pin", sa.Text, nullable=False),
        sa.Column("content_hash", sa.String(64), nullable=False, index=True),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("started_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.Column("ends_as", sa.String(16)),
        sa.Column("reason", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "results",
        *_keys("job_seq", "row"),
        sa.Column("ok", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("num_prompt_tokens", sa.Integer, nullable=False),
        sa.Column("num_output_tokens", sa.Integer, nullable=False),
        sa.Column("num_cached_tokens", sa.Integer, nullable=False),
        sa.Column("duration_s", sa.Float, nullable=False),
        sa.Column("committed_at", sa.Float, nullable=False),
        sqlite_with_rowid=False,
    )
    of_a_row: dict[str, sa.Column[Any]] = {
        "bodies": sa.Column("content", sa.LargeBinary, nullable=False),
        "attempts": sa.Column("num_attempts", sa.Integer, nullable=False),
        "suspects": sa.Column("num_engine_deaths", sa.Integer, nullable=False),
    }
    for name, column in of_a_row.items():
        op.create_table(name, *_keys("job_seq", "row"), column)
    op.create_table(
        "epochs",
        _numbered("epoch"),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "settings",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def _keep_counts_of_ended_jobs(op: Operations) -> None:
    """Also the instant when a job's results were removed."""
    jobs = sa.table("jobs", *map(sa.column, ("seq", "state", *COUNTS)))
    results = sa.table("results", *map(sa.column, ("job_seq", "ok", *COUNTS[2:])))
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


def _add_files_and_batches(op: Operations) -> None:
    """Also the instants when a job began to finalize or to be cancelled."""
    op.add_column("jobs", sa.Column("finalizing_at", sa.Float))
    op.add_column("jobs", sa.Column("cancelling_at", sa.Float))
    op.create_table(
        "files",
        _numbered("seq"),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("owner", sa.String(64)),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "batches",
        *_keys("job_seq"),
        sa.Column("owner", sa.String(64)),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(64), nullable=False),
        sa.Column("metadata", sa.Text),
        sa.Column("output_expires_after_s", sa.Integer),
        sa.Column("model", sa.Text),
        sa.Column("errors", sa.Text),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("num_reasoning_tokens", sa.BigInteger),
        sa.Column("idempotency_hash", sa.String(64), unique=True),
        sa.Column("request_hash", sa.String(64), nullable=False),
    )


def _add_api_keys(op: Operations) -> None:
    """Also the tokens that a batch keeps of its key's quota."""
    op.add_column("batches", sa.Column("num_enqueued_tokens", sa.BigInteger))
    op.create_table(
        "api_keys",
        _numbered("seq"),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("slo_class", sa.String(64)),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("enqueued_tokens", sa.BigInteger),
        sa.Column("concurrent_batches", sa.Integer),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("revoked_at", sa.Float),
        sqlite_autoincrement=True,
    )


def _limit_stored_bytes(op: Operations) -> None:
    """What the files of a key may hold together."""
    op.add_column("api_keys", sa.Column("stored_bytes", sa.BigInteger))


def _bound_calls_and_batches(op: Operations) -> None:
    """How many calls a key may have at once, and what its batches may ask for."""
    op.add_column("api_keys", sa.Column("concurrent_calls", sa.Integer))
    op.add_column("api_keys", sa.Column("max_weight", sa.Float))
    op.add_column("api_keys", sa.Column("min_deadline_s", sa.Float))


def _find_what_a_key_stores(op: Operations) -> None:
    """Also what the metadata and the errors of a batch hold; removals left them until here."""
    op.add_column("batches", sa.Column("record_bytes", sa.BigInteger))
    removed = "job_seq IN (SELECT seq FROM jobs WHERE results_removed_at IS NOT NULL)"
    op.execute(f"UPDATE batches SET metadata = NULL, errors = NULL WHERE {removed}")
    size = "coalesce(length(metadata), 0) + coalesce(length(errors), 0)"
    op.execute(f"UPDATE batches SET record_bytes = {size} WHERE NOT {removed}")
    op.create_index("ix_files_owner", "files", ["owner", "seq", "expires_at", "size_bytes"])
    op.create_index("ix_files_purpose", "files", ["owner", "purpose", "seq"])
    op.create_index("ix_batches_owner", "batches", ["owner", "job_seq", "record_bytes"])


def _numbered(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, primary_key=True, autoincrement=True)


def _keys(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer, primary_key=True, autoincrement=False) for name in names]


MIGRATIONS: dict[str, Callable[[Operations], None]] = {
    "0001": _create_first_schema,
    "0002": _keep_counts_of_ended_jobs,
    "0003": _add_files_and_batches,
    "0004": _add_api_keys,
    "0005": _limit_stored_bytes,
    "0006": _bound_calls_and_batches,
    "0007": _find_what_a_key_stores,
}
"""By the revision that each leads to, in their order."""


def upgrade(connection: sa.Connection, revision: str | None) -> None:
    """Run every migration after `revision` (None: all of them), and record the newest.

    The caller's transaction makes it one change.
    """
    op = Operations(MigrationContext.configure(connection))
    if revision is None:
        # Named as alembic's own command line names it.
        op.create_table(
            "alembic_version",
            sa.Column("version_num", sa.String(32), nullable=False),
            sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
        )
    for newer, migration in MIGRATIONS.items():
        if revision is None or newer > revision:
            migration(op)
    version = sa.table("alembic_version", sa.column("version_num"))
    connection.execute(sa.delete(version))
    connection.execute(sa.insert(version).values(version_num=max(MIGRATIONS)))
