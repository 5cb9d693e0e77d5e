"""An engine that somebody else runs: batchrun only calls it."""

from __future__ import annotations

import asyncio
import time

from batchrun.engine.client import EngineClient
from batchrun.engine.settings import AttachedSettings
from batchrun.errors import EngineError
from batchrun.types import EngineState

_POLL_S = 0.2


class AttachedEngine:
    """A URL of a running OpenAI-compatible server."""

    def __init__(self, settings: AttachedSettings) -> None:
        """Opens nothing yet. Raises ConfigError when the URL is not one."""
        self.name = settings.name
        self.client = EngineClient(settings.url, api_key=settings.api_key)
        self.state = EngineState.STARTING
        self.stage = "connecting"
        self._settings = settings

    async def start(self) -> None:
        """Wait a few seconds for `/health`. Raises EngineError naming the URL."""
        deadline_s = time.monotonic() + self._settings.start_timeout_s
        while not await self.client.is_healthy():
            if time.monotonic() > deadline_s:
                self._mark(is_healthy=False)
                raise EngineError(
                    f"engine {self.name}: nothing answers at {self.client.base_url}/health; "
                    "start the engine or correct its url"
                )
            await asyncio.sleep(_POLL_S)
        self._mark(is_healthy=True)

    async def watch(self) -> None:
        """Keep `state` at READY or UNREACHABLE, for ever."""
        while True:
            await asyncio.sleep(self._settings.check_interval_s)
            self._mark(is_healthy=await self.client.is_healthy())

    async def stop(self) -> None:
        """Close the connections; the engine itself is not ours to end."""
        self.state = EngineState.STOPPED
        self.stage = "stopped"
        await self.client.close()

    def _mark(self, *, is_healthy: bool) -> None:
        self.state = EngineState.READY if is_healthy else EngineState.UNREACHABLE
        self.stage = "ready" if is_healthy else f"no answer from {self.client.base_url}"
