"""An engine with an agent, and the wire to its scheduler: what the daemon has of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from batchrun.engine.agent import messages
from batchrun.engine.agent.remote import CONNECT_S, FIRST_RETRY_S, AgentAddress, AgentClient, ignore
from batchrun.engine.progress import Progress
from batchrun.engine.sockets import Hear
from batchrun.errors import EngineError
from batchrun.types import EnginePhase
from batchrun.wire import RowKey


class AgentEngine:
    """An engine with an agent, which starts, watches and ends it."""

    def __init__(self, address: AgentAddress) -> None:
        """Opens nothing yet. Raises ConfigError when url, secret or certificate cannot be used."""
        self.name = address.name
        self.address = address
        self.client = AgentClient(address)
        self.progress = Progress()

    @property
    def state(self) -> EnginePhase:
        known = self.client.state
        if known is None or known.is_draining or self.progress.is_hung:
            return EnginePhase.UNREACHABLE
        return known.phase

    @property
    def stage(self) -> str:
        """What the agent says of its engine, or why it says nothing."""
        known = self.client.state
        if known is None:
            return f"the agent does not answer: {self.client.trouble}"
        is_emptied = known.is_emptied and known.phase is EnginePhase.READY
        stage = "being emptied" if is_emptied else known.stage
        stage = "draining" if known.is_draining else stage
        if self.progress.is_hung:
            stage = f"no progress for {self.progress.stalled_s:.0f} s with work in flight"
        return f"{stage}, by its agent at {urlsplit(self.client.base_url).netloc}"

    @property
    def started(self) -> int:
        """Another number each time its process starts; 0 while that is not known."""
        return 0 if self.client.state is None else self.client.state.started

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new work, or is to get none."""
        known = self.client.state
        return known is not None and (known.is_draining or bool(known.is_emptied))

    @property
    def is_attached(self) -> bool:
        """Whether it was started by somebody else than its agent, which it outlives."""
        known = self.client.state
        return known is not None and known.is_attached

    @property
    def direct_url(self) -> str | None:
        """Where the engine answers by itself, on this machine; None where only its agent does, as
        while that drains."""
        known = self.client.state
        if known is None or known.is_draining or known.place != messages.here():
            return None
        return known.engine_url

    @property
    def direct_key(self) -> str | None:
        """What the engine asks for at `direct_url`."""
        known = self.client.state
        return self.client.engine_key if known is not None and known.needs_key else None

    @property
    def last_steps(self) -> frozenset[RowKey]:
        """The rows of the last steps of an engine that went down, as far as they are known."""
        known = self.client.state
        return frozenset() if known is None else frozenset(known.last_steps)

    async def start(self) -> None:
        """Connect, and wait until the engine answers. Raises EngineError when the agent does not,
        or its engine fails."""
        self.client.connect()
        deadline_s = time.monotonic() + CONNECT_S
        while self.state is not EnginePhase.READY:
            now_s = time.monotonic()
            if self.client.state is not None:
                deadline_s = max(deadline_s, now_s + CONNECT_S)
            if now_s > deadline_s:
                raise EngineError(f"engine {self.name}: {self.stage}")
            await asyncio.sleep(FIRST_RETRY_S)

    async def watch(self) -> None:
        """The connection keeps `state` true, for ever."""
        self.client.connect()
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Close the connection; the agent and its engine go on."""
        await self.client.close()


@dataclass(slots=True)
class AgentWire:
    """The wire to the scheduler of an engine that has an agent."""

    client: AgentClient

    async def run(self, on_telemetry: Hear, on_answer: Hear) -> None:
        """Hand over what comes in, until cancelled."""
        self.client.on_telemetry, self.client.on_answer = on_telemetry, on_answer
        try:
            await asyncio.Event().wait()
        finally:
            self.client.on_telemetry = self.client.on_answer = ignore

    async def send(self, orders: bytes) -> bool:
        """Send orders; False when the agent is not there."""
        return await self.client.send_orders(orders)
