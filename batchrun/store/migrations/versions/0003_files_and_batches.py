"""OpenAI's files and batches, and the instants when a job began to finalize or to be cancelled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the tables and the columns."""
    op.add_column("jobs", sa.Column("finalizing_at", sa.Float))
    op.add_column("jobs", sa.Column("cancelling_at", sa.Float))
    op.create_table(
        "files",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
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
        sa.Column("job_seq", sa.Integer, primary_key=True, autoincrement=False),
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
