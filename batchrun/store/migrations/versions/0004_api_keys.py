"""API keys, and the tokens that a batch keeps of its key's quota."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the table and the column."""
    op.add_column("batches", sa.Column("num_enqueued_tokens", sa.BigInteger))
    op.create_table(
        "api_keys",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
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
