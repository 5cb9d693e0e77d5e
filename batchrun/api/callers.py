"""Who calls OpenAI's routes: the gateway says by its own key that it speaks, and for whom."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from fastapi import Request
from starlette.exceptions import HTTPException

from batchrun.home import CALLER_HEADER, GATEWAY_HEADER
from batchrun.store import Store, api_keys
from batchrun.store.api_keys import NO_LIMITS, KeyLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call this is: `owner` is the id of his API key, None where no key is asked for.

    `scope` is whose files and batches he sees, as in `store/files.py`.
    """

    owner: str | None = None
    scope: str | None = None
    limits: KeyLimits = NO_LIMITS


ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class Callers:
    """Lets calls in that carry `gateway_key`, and leaves their caller in `request.state`."""

    store: Store
    gateway_key: str

    async def check(self, request: Request) -> None:
        """A dependency of every route. Raises HTTPException."""
        given = request.headers.get(GATEWAY_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.gateway_key.encode()):
            raise HTTPException(401, "ask the gateway, not the daemon")
        key_id = request.headers.get(CALLER_HEADER)
        caller = ANYBODY
        if key_id is not None:
            key = await asyncio.to_thread(api_keys.find, self.store, key_id)
            if key is None or key.revoked_at is not None:
                raise HTTPException(401, "the API key is not known any more")
            caller = Caller(key.id, key.scope, key.limits)
        request.state.caller = caller


def caller_of(request: Request) -> Caller:
    """Whose call a request is."""
    caller: Caller = request.state.caller
    return caller
