"""SLO classes as the upstreams file names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from batchrun.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SloBounds:
    """The bounds of one class, in seconds: first token, each token after it, and the last one."""

    ttft_s: float
    tpot_s: float
    jct_s: float | None = None


SloClasses = Mapping[str, SloBounds]


def read_classes(document: object, where: str) -> SloClasses:
    """The classes of the upstreams file. Raises ConfigError."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must be an object")
    return {name: _bounds(entry, f"{where}.{name}") for name, entry in document.items()}


def _bounds(entry: object, where: str) -> SloBounds:
    values = entry if isinstance(entry, dict) else {}
    ttft_s, tpot_s, jct_s = (values.get(key) for key in ("ttft_s", "tpot_s", "jct_s"))
    if _is_bound(ttft_s) and _is_bound(tpot_s) and (jct_s is None or _is_bound(jct_s)):
        return SloBounds(ttft_s, tpot_s, jct_s)
    raise ConfigError(f"{where}: `ttft_s` and `tpot_s` must be seconds, `jct_s` seconds or null")


def _is_bound(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
