"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "jobs",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
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
        *_job_row_key(),
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
    op.create_table("bodies", *_job_row_key(), sa.Column("content", sa.LargeBinary, nullable=False))
    op.create_table(
        "attempts", *_job_row_key(), sa.Column("num_attempts", sa.Integer, nullable=False)
    )
    op.create_table(
        "suspects", *_job_row_key(), sa.Column("num_engine_deaths", sa.Integer, nullable=False)
    )
    op.create_table(
        "epochs",
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "settings",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def _job_row_key() -> tuple[sa.Column[int], sa.Column[int]]:
    return (
        sa.Column("job_seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("row", sa.Integer, primary_key=True, autoincrement=False),
    )
