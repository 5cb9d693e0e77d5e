"""SLO classes: the bounds that a call is promised, by its header, by its key, or by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from multidict import CIMultiDictProxy

from batchrun.errors import ConfigError
from batchrun.gateway.refusal import CallRefusedError
from batchrun.types import DEFAULT_CLASS

CLASS_HEADER = "X-Batchrun-Class"


@dataclass(frozen=True, slots=True)
class SloBounds:
    """The bounds of one class, in seconds: first token, each token after it, and the last one."""

    ttft_s: float
    tpot_s: float
    jct_s: float | None = None


SloClasses = Mapping[str, SloBounds]


def choose_class(
    headers: CIMultiDictProxy[str], key_class: str | None, classes: SloClasses
) -> SloBounds | None:
    """What a call is promised: its header decides, then the class of its key (None: it has none),
    then the default, which is None since the engines know it.

    Raises CallRefusedError when the header names no class. A class of a key that is not there any
    more is the default one: its callers cannot help it.
    """
    given = headers.getall(CLASS_HEADER, [])
    if not given:
        return None if key_class is None else classes.get(key_class)
    name = given[0] if len(given) == 1 else ", ".join(given)
    if name == DEFAULT_CLASS:
        return None
    if name not in classes:
        known = ", ".join([DEFAULT_CLASS, *classes])
        raise CallRefusedError(
            f"{CLASS_HEADER.lower()}: no SLO class has the name '{name}'; there is {known}",
            code="invalid_value",
            param=CLASS_HEADER.lower(),
        )
    return classes[name]


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
