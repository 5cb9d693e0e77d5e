"""Commands that simulate need a Python in which vLLM can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchrun.errors import EngineError


@contextmanager
def vllm_needed(command: str) -> Iterator[None]:
    """Around the import of what simulates. Raises EngineError, one line, where vLLM is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in {"vllm", "torch"}:
            raise EngineError(
                f"{command} runs vLLM's own scheduler, and vLLM cannot be imported here; use the "
                "Python in which the engines run"
            ) from error
        raise
