"""What one gateway process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchrun.errors import ConfigError

MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway; `port` 0 takes any free port.

    `keys_path` lists the API keys; None: nobody is asked for one. `drain_s`: how long a stream may
    go on after SIGTERM. `body_idle_s`: the longest pause in an upload. `max_body_bytes` bounds one
    request body.
    """

    host: str
    port: int
    upstreams_path: Path
    keys_path: Path | None = None
    num_workers: int = 1
    drain_s: float = 30.0
    body_idle_s: float = 30.0
    max_body_bytes: int = MAX_BODY_BYTES


def parse_listen(listen: str) -> tuple[str, int]:
    """Split `HOST:PORT` (`[::1]:8000` for IPv6). Raises ConfigError."""
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen: {listen!r} is not HOST:PORT, for example 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)
