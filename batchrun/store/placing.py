"""Which store a home has: its SQLite file, or the database that its batchrun.yaml names."""

from __future__ import annotations

from batchrun.errors import ConfigError
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.store.database import Store, name_of, open_store, open_to_read
from batchrun.store.jobs import list_jobs
from batchrun.store.migrate import find_revision


def open_for(home: Home, url: str | None) -> Store:
    """Open the home's store as batchrun.yaml has it, and record a database's URL in the home.

    `url` is None for the SQLite file. Raises ConfigError, and changes nothing, when the jobs of
    the home are in another store; StoreError.
    """
    _refuse_other(home, url)
    store = open_store(url or home.store)
    if url is not None and url != home.store_location:
        write_atomically(home.store_url_file, f"{url}\n".encode(), mode=0o600)
    return store


def _refuse_other(home: Home, url: str | None) -> None:
    wanted = "no `store`" if url is None else f"`store` {name_of(url)}"
    if home.store_url_file.exists():
        now = name_of(home.store_location)
        if url is None or name_of(url) != now:
            raise ConfigError(
                f"the jobs of {home.path} are in {now}, and batchrun.yaml has {wanted}; name that "
                "database there, or use another --home"
            )
    elif url is not None and home.store.exists() and _has_jobs(home):
        raise ConfigError(
            f"the jobs of {home.path} are in {home.store}, and batchrun.yaml has {wanted}; leave "
            "it out, or use another --home"
        )


def _has_jobs(home: Home) -> bool:
    store = open_to_read(home.store)
    try:
        return find_revision(store.engine, store.name) is not None and bool(list_jobs(store))
    finally:
        store.close()
