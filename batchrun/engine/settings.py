"""What an engine is told at its making. Frozen; `batchrun/config` fills it in."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is letters, digits, dot, dash and underscore."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"engine name {name!r}: use 1 to 64 letters, digits, dots, dashes or underscores"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSettings:
    """An engine that batchrun starts, watches and ends.

    `model` is a folder or a hub id; `served_model_name` is the id callers use (default: `model`).
    `python` is the interpreter whose environment holds vLLM. `url`, when set, is the address by
    which to reach the engine instead of host and port (a recording proxy in front of it).
    `vllm_args` are passed through verbatim and win over ours; `env` is laid over this process's
    environment. `command`, when set, replaces the whole vLLM command line.
    `scheduler`, when set, puts batchrun's scheduler into vLLM, with these settings.
    """

    name: str
    model: str
    port: int
    run_dir: Path
    log_dir: Path
    served_model_name: str | None = None
    python: Path = field(default_factory=lambda: Path(sys.executable))
    host: str = "127.0.0.1"
    url: str | None = None
    vllm_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    scheduler: Mapping[str, object] | None = None
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    check_interval_s: float = 1.0
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 60.0
    healthy_reset_s: float = 60.0
    unresponsive_restart_s: float = 120.0
    max_failed_starts: int = 5

    def __post_init__(self) -> None:
        """Raises ConfigError when the name could not stand in a file name."""
        check_name(self.name)

    @property
    def base_url(self) -> str:
        """The address the client uses."""
        return self.url or f"http://{self.host}:{self.port}"

    @property
    def record_path(self) -> Path:
        """Where the process record stands."""
        return self.run_dir / f"engine-{self.name}.json"

    @property
    def log_path(self) -> Path:
        """Where the engine's own output goes."""
        return self.log_dir / f"engine-{self.name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedSettings:
    """An engine that somebody else runs. `api_key` is sent as a bearer token."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    check_interval_s: float = 1.0
    start_timeout_s: float = 5.0
