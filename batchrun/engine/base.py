"""The one interface of all engines."""

from __future__ import annotations

from typing import Protocol

from batchrun.engine.client import EngineClient
from batchrun.types import EngineState


class Engine(Protocol):
    """An engine as the daemon sees it.

    `state` says whether requests may be sent (only READY); `stage` is a few words for people,
    such as "loading weights" or why the engine is down.
    """

    @property
    def name(self) -> str:
        """The name in the deployment file."""
        ...

    @property
    def client(self) -> EngineClient:
        """Where requests go."""
        ...

    @property
    def state(self) -> EngineState:
        """The present state."""
        ...

    @property
    def stage(self) -> str:
        """The present stage, for people."""
        ...

    async def start(self) -> None:
        """Return when the engine answers. Raises EngineError with one line when it cannot."""
        ...

    async def watch(self) -> None:
        """Keep `state` true, for ever; cancel it to end. Call after `start`."""
        ...

    async def stop(self) -> None:
        """End the engine if batchrun started it, and close the client."""
        ...
