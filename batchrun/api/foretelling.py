"""The control route that tells when a job would be done, were it submitted now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import FastAPI, params
from pydantic import BaseModel, ConfigDict, Field

from batchrun.daemon import Daemon
from batchrun.home import CONTROL_PREFIX as PREFIX
from batchrun.jobspec import Weight


class NewWork(BaseModel):
    """What a job would compute, and its share beside others."""

    model_config = ConfigDict(extra="forbid")

    computed_tokens: Annotated[int, Field(ge=0, le=1 << 60)]
    weight: Weight = 1.0


def install_foretelling(app: FastAPI, daemon: Daemon, guarded: Sequence[params.Depends]) -> None:
    """Add the route to the daemon's."""

    @app.post(f"{PREFIX}/foretell", dependencies=guarded)
    async def foretell(work: NewWork) -> dict[str, object]:
        turns = daemon.dispatcher.assigner.turns
        tokens_per_s, seen_s = turns.pace
        completion = turns.foretell(work.weight, work.computed_tokens)
        return {
            "eta": None if completion is None else completion._asdict(),
            "computed_tokens_per_s": tokens_per_s,
            "seen_s": seen_s,
            "num_running_jobs": len(daemon.dispatcher.jobs),
            "num_engines": len(daemon.slots),
        }
