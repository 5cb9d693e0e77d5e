"""One engine of the daemon, as the dispatch sees it: what its process and its telemetry tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrun.config import WindowConfig
from batchrun.daemon.dispatch import Assignment, EngineSlot
from batchrun.daemon.engine_link import EngineLink
from batchrun.daemon.faults import accuse_rows
from batchrun.engine.client import KvConfig
from batchrun.engine.engine import Engine
from batchrun.pool.row_queue import Window
from batchrun.types import EngineState
from batchrun.wire import Telemetry, read_last_steps

SCHEDULER_WINDOW = (256, 2_000_000)
PLAIN_WINDOW = (32, 400_000)
"""(rows, prompt tokens) where batchrun.yaml says nothing."""


@dataclass(slots=True, eq=False)
class Slot(EngineSlot):
    """An engine with its process or address.

    `hint_nonce`, `link` and `last_steps` are set where batchrun's scheduler runs inside it: rows
    then carry hints, the engine can be watched and steered, and a dead one leaves a file that says
    what it ran. `kv` is None until the engine has told it. `accused` are the rows that it may have
    died of, None until that was looked into.
    """

    engine: Engine
    uses_priority: bool
    hint_nonce: str | None = None
    link: EngineLink | None = None
    last_steps: Path | None = None
    kv: KvConfig | None = None
    default_model: str | None = None
    accused: Sequence[Assignment[Any, Any]] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether rows may be sent."""
        return self.engine.state is EngineState.READY and not self.is_down

    @property
    def is_lost(self) -> bool:
        """Whether it was given up or stopped."""
        return self.engine.state in {EngineState.FAILED, EngineState.STOPPED}

    @property
    def runs_scheduler(self) -> bool:
        """Whether batchrun's scheduler runs in it."""
        return self.hint_nonce is not None

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block of its KV; None where it does not tell."""
        return None if self.kv is None else self.kv.block_tokens

    @property
    def num_running(self) -> int:
        """By its telemetry; 0 without."""
        telemetry = self._telemetry
        return 0 if telemetry is None else telemetry.offline.num_running

    @property
    def num_other_calls(self) -> int:
        """By its telemetry; 0 without."""
        telemetry = self._telemetry
        if telemetry is None:
            return 0
        online, offline = telemetry.online, telemetry.offline
        num_flex = max(0, offline.num_running + offline.num_waiting - len(self.in_flight))
        return online.num_running + online.num_waiting + num_flex

    @property
    def _telemetry(self) -> Telemetry | None:
        return None if self.link is None else self.link.telemetry

    def accuse(self) -> Sequence[Assignment[Any, Any]]:
        """The engine died: find the rows that it may have died of, all of them suspects now."""
        last = frozenset() if self.last_steps is None else read_last_steps(self.last_steps)
        self.accused = [self.in_flight[key] for key in accuse_rows(self.in_flight, last)]
        return self.accused

    def came_back(self) -> None:
        """The engine answers: rows may go to it."""
        self.is_down, self.accused = False, None


def window_of(config: WindowConfig, *, runs_scheduler: bool) -> Window:
    """The window of one engine.

    batchrun's scheduler chooses among many candidates; vLLM's own runs them as they come.
    """
    requests, tokens = SCHEDULER_WINDOW if runs_scheduler else PLAIN_WINDOW
    return Window(config.requests or requests, config.tokens or tokens)
