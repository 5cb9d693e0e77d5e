"""The folder that holds a deployment's state, and the address that its daemon leaves there."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from batchrun.errors import ConfigError
from batchrun.files import make_folder

CONTROL_PREFIX = "/batchrun/v1"
"""Where the daemon's control routes begin."""

GATEWAY_HEADER = "X-Batchrun-Gateway"
"""The header in which the gateway shows the daemon that a call comes through it."""

TALLY_PATH = "/batchrun/tally"
"""Where the gateway tells the daemon, and nobody else, what it has counted."""

ROUTING_PATH = "/batchrun/routing"
"""Where the gateway tells the daemon, and nobody else, why calls went where they went."""

CALLER_HEADER = "X-Batchrun-Key"
"""The header in which the gateway tells the daemon the id of the caller's API key."""


NO_ENGINE_HEADER = "X-Batchrun-No-Engine"
"""The header of an agent's refusal where its engine takes no call now: another may."""


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """Where a running daemon answers. The file that holds it is readable by its owner alone."""

    pid: int
    url: str
    token: str


UNLISTED = "unlisted"
"""The folder, among files of the API, of those that a starting daemon's store did not list."""
DEFAULT_HOME = Path("~/.local/state/batchrun")


class Home:
    """The folder that holds a deployment's state, and where each thing lies in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.store = self.path / "store.db"
        self.store_url_file = self.path / "store-url"
        self.files_url_file = self.path / "files-url"
        self.store_lock = self.path / "store.lock"
        self.run = self.path / "run"
        self.log = self.path / "log"
        self.inputs = self.path / "inputs"
        self.files = self.path / "files"
        self.results = self.path / "results"
        self.frames = self.path / "frames"
        self.uploads = self.path / "uploads"
        self.unlisted = self.files / UNLISTED
        self.engine_environment = self.path / "engine-env"
        self.trace_salt = self.path / "trace-salt"
        self.history = self.path / "history.jsonl"
        self.profiles = self.path / "profiles"
        self.models = self.path / "models"
        self.daemon_record = self.run / "daemon.json"
        self.daemon_process = self.run / "daemon-process.json"
        self.gateway_process = self.run / "gateway-process.json"
        self.gateway_answers = self.run / "gateway.socket"
        self.upstreams = self.run / "upstreams.json"
        self.api_keys = self.run / "api-keys.json"
        self.key_usage = self.run / "api-keys.usage"
        self.hint_nonce = self.run / "hint-nonce"
        self.plugin = self.run / "plugin"
        self.last_start = self.run / "last-start"
        self.resolved_config = self.run / "config.json"

    @property
    def kept_rows(self) -> tuple[Path, ...]:
        """Where rows lie that came from a DataFrame or the page, beside their answers, and files of
        the API that the store did not list when a daemon began."""
        return (self.frames, self.uploads, self.unlisted)

    def agent(self, name: str) -> Home:
        """The home of an engine's agent: what concerns that engine lies there."""
        return Home(self.path / "agents" / name)

    def agent_process(self, name: str) -> Path:
        """The record of an agent that runs in the background."""
        return self.run / f"agent-{name}.json"

    def replica_process(self, name: str) -> Path:
        """The record of the agent of a fleet's replica, which whoever leads has ended."""
        return self.run / f"replica-{name}.json"

    def fleet(self, name: str) -> Path:
        """What was last told of the replicas of a fleet; beside it, with other endings, lies what
        belongs to it."""
        return self.run / f"fleet-{name}.json"

    def engine_key(self, name: str) -> Path:
        """The secret of an engine that batchrun starts."""
        return self.run / f"engine-{name}.key"

    @property
    def agent_secret(self) -> Path:
        """In an agent's home: the secret that it makes where it is given none."""
        return self.path / "secret"

    @property
    def recorded_store_url(self) -> str | None:
        """The database's URL that `batchrun up` recorded, which may hold a password; None where
        the jobs are in the SQLite file."""
        try:
            return self.store_url_file.read_text().strip()
        except FileNotFoundError:
            return None

    @property
    def store_location(self) -> str | Path:
        """Where the jobs are: a database's URL, or the SQLite file."""
        return self.recorded_store_url or self.store

    @property
    def files_url(self) -> str | None:
        """Where in object storage the files of OpenAI's API lie, as `batchrun up` recorded it;
        None for the home folder."""
        try:
            return self.files_url_file.read_text().strip()
        except FileNotFoundError:
            return None

    @property
    def has_store(self) -> bool:
        """Whether this home has a store yet."""
        return self.store_url_file.exists() or self.store.exists()

    def create(self) -> None:
        """Make the folders, readable by their owner alone. Raises ConfigError."""
        try:
            for folder in self._folders:
                make_folder(folder, mode=0o700)
        except OSError as error:
            is_file = isinstance(error, FileExistsError)
            raise self._refused("it is a file" if is_file else error.strerror) from error

    def check(self) -> None:
        """Raises ConfigError where `create` would, as far as that shows without making anything."""
        if any(place.exists() and not place.is_dir() for place in self._folders):
            raise self._refused("it is a file")
        if all(folder.is_dir() for folder in self._folders):
            return
        nearest = next(place for place in (self.path, *self.path.parents) if place.exists())
        if not nearest.is_dir():
            raise self._refused(os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise self._refused(os.strerror(errno.EACCES))

    def _refused(self, reason: str | None) -> ConfigError:
        return ConfigError(
            f"{self.path}: cannot be the home ({reason}); choose another folder with "
            "--home or BATCHRUN_HOME"
        )

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (self.path, self.run, self.log, self.inputs, self.files, self.results)

    def read_daemon_address(self) -> DaemonAddress | None:
        """The address that a daemon of this home left; it may have died since."""
        try:
            return DaemonAddress(**json.loads(self.daemon_record.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def check_store_url(url: str) -> None:
    """Raise ValueError for what is no PostgreSQL URL; its message does not repeat the password."""
    try:
        parts = urlsplit(url)
        is_sound = parts.port != 0 and parts.netloc.count("@") < 2 and not parts.fragment
    except ValueError:
        is_sound = False
    if not is_sound or parts.scheme != "postgresql" or not parts.path.strip("/"):
        raise ValueError(
            "must be postgresql://USER:PASSWORD@HOST/DATABASE, with %XX for special characters in "
            "the password; left out, jobs are kept in a file in the home folder"
        )
