"""How alembic runs our migrations: on the connection and transaction of `migrate`."""

from __future__ import annotations

from alembic import context

from batchrun.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
