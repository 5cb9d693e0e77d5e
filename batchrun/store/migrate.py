"""Bring a store's schema to this version of batchrun. Migrations are an append-only list."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, inspect, text

from batchrun.errors import StoreError

HEAD = "0001"
SCRIPTS = Path(__file__).parent / "migrations"


def migrate(engine: Engine, url: str) -> None:
    """Run the migrations that `engine`'s store lacks; nothing when it is current.

    Raises StoreError when the store was written by a newer batchrun, or is another database.
    """
    current = _current_revision(engine, url)
    if current == HEAD:
        return
    if current is not None and current > HEAD:
        raise StoreError(
            f"{url}: written by a newer batchrun (schema {current}, this one knows {HEAD}); upgrade"
        )
    _upgrade(engine)


def _current_revision(engine: Engine, url: str) -> str | None:
    with engine.connect() as connection:
        tables = set(inspect(connection).get_table_names())
        if "alembic_version" in tables:
            found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            return None if found is None else str(found)
    if tables:
        raise StoreError(f"{url}: holds other tables; not a batchrun store")
    return None


def _upgrade(engine: Engine) -> None:
    # Imported late: alembic takes longer to import than most commands run, and few need it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.set_main_option("path_separator", "os")
    with engine.execution_options(batchrun_write=True).begin() as conn:
        config.attributes["connection"] = conn
        command.upgrade(config, "head")
