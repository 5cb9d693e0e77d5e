"""The control routes of `batchrun keys`. The text of a key never comes here, only its hash."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import FastAPI, params
from pydantic import BaseModel, ConfigDict, Field

from batchrun.daemon.key_list import KeyList
from batchrun.home import CONTROL_PREFIX as PREFIX
from batchrun.store.api_keys import MAX_COUNT, MAX_TOKENS, KeyLimits, NewApiKey, Role


class _Limits(BaseModel):
    """See `KeyLimits`."""

    model_config = ConfigDict(extra="forbid")

    requests_per_minute: Annotated[int | None, Field(gt=0, le=MAX_COUNT)]
    enqueued_tokens: Annotated[int | None, Field(gt=0, le=MAX_TOKENS)]
    concurrent_batches: Annotated[int | None, Field(gt=0, le=MAX_COUNT)]


class KeySubmission(BaseModel):
    """See `NewApiKey`."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(pattern=r"^key_[0-9a-z]{12}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    role: Role
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    slo_class: str | None
    limits: _Limits


def install_key_routes(app: FastAPI, keys: KeyList, guarded: Sequence[params.Depends]) -> None:
    """Create and revoke API keys."""

    @app.post(f"{PREFIX}/keys", dependencies=guarded)
    async def create(given: KeySubmission) -> dict[str, object]:
        values = given.model_dump()
        limits = KeyLimits(**values.pop("limits"))
        added = await asyncio.to_thread(keys.add, NewApiKey(**values, limits=limits))
        return {"id": added.id}

    @app.post(PREFIX + "/keys/{key}/revoke", dependencies=guarded)
    async def revoke(key: str) -> dict[str, object]:
        revoked = await asyncio.to_thread(keys.revoke, key)
        return {"id": revoked.id, "name": revoked.name}
