"""The route that `batchrun trace record` asks for the online calls that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import FastAPI, params
from msgspec import to_builtins
from pydantic import BaseModel, ConfigDict, Field

from batchrun.daemon import Daemon
from batchrun.home import CONTROL_PREFIX as PREFIX


class CallsWanted(BaseModel):
    """The number from which calls are wanted, by engine; 0 for engines left out."""

    model_config = ConfigDict(extra="forbid")

    numbers: dict[str, Annotated[int, Field(ge=0)]] = {}


def install_recording(app: FastAPI, daemon: Daemon, guarded: Sequence[params.Depends]) -> None:
    """Add the route. To ask is to record: engines stop some seconds after the last question."""

    @app.post(f"{PREFIX}/calls", dependencies=guarded)
    async def collect_calls(wanted: CallsWanted) -> dict[str, object]:
        steering = daemon.steering
        recordings = await steering.collect_calls(wanted.numbers)
        names = (slot.engine.name for slot in daemon.slots)
        return {
            "engines": to_builtins(recordings),
            "unrecorded": [name for name in names if name not in steering.links],
        }
