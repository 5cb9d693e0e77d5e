"""Which SLO class a call has: by its header, by its key, or by default."""

from __future__ import annotations

from multidict import CIMultiDictProxy

from batchrun.gateway.headers import CLASS_HEADER
from batchrun.gateway.refusal import RefusalError
from batchrun.gateway.slo_classes import SloBounds, SloClasses
from batchrun.types import DEFAULT_CLASS


def choose_class(
    headers: CIMultiDictProxy[str], key_class: str | None, classes: SloClasses
) -> SloBounds | None:
    """What a call is promised: its header decides, then the class of its key (None: it has none),
    then the default, which is None since the engines know it.

    Raises RefusalError when the header names no class. A class of a key that is not there any
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
        raise RefusalError(
            400,
            f"{CLASS_HEADER.lower()}: no SLO class has the name '{name}'; there is {known}",
            code="invalid_value",
            param=CLASS_HEADER.lower(),
        )
    return classes[name]
