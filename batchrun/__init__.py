"""batchrun: offline LLM batch jobs on the GPUs that serve your live traffic.

`map`, `stream` and `submit` are what Python code calls; `docs/python.md` has examples. They are
loaded when they are first asked for: to import batchrun costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun.python.handle import Job as Job
    from batchrun.python.handle import submit as submit
    from batchrun.python.mapping import map as map
    from batchrun.python.mapping import stream as stream

__version__ = "0.1.0"
__all__ = ["Job", "__version__", "map", "stream", "submit"]

_PLACES = {"Job": "handle", "submit": "handle", "map": "mapping", "stream": "mapping"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'batchrun' has no attribute {name!r}")
    return getattr(import_module(f"batchrun.python.{_PLACES[name]}"), name)
