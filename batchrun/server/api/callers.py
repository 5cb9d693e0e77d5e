"""Who calls OpenAI's routes: the gateway says by its own key that it speaks, and for whom."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from fastapi import Request
from starlette.exceptions import HTTPException

from batchrun.home import CALLER_HEADER, GATEWAY_HEADER
from batchrun.server.api.errors import ApiError
from batchrun.store import api_keys
from batchrun.store.api_keys import NO_LIMITS, KeyLimits
from batchrun.store.database import Store


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call this is: `owner` is the id of his API key, None where no key is asked for.

    `scope` is whose files and batches he sees, as in `store/files.py`.
    """

    owner: str | None = None
    scope: str | None = None
    limits: KeyLimits = NO_LIMITS

    @property
    def is_admin(self) -> bool:
        """Whether he holds an admin key, or no key is asked for."""
        return self.scope is None


ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class Callers:
    """Lets calls in that carry `gateway_key`, and leaves their caller in `request.state`."""

    store: Store
    gateway_key: str

    async def check(self, request: Request) -> None:
        """A dependency of every route. Raises HTTPException and ApiError."""
        given = request.headers.get(GATEWAY_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.gateway_key.encode()):
            raise HTTPException(401, "ask the gateway, not the daemon")
        request.state.caller = await asyncio.to_thread(
            self._caller, request.headers.get(CALLER_HEADER)
        )

    def _caller(self, key_id: str | None) -> Caller:
        """A gateway that does not know the newest keys lets nobody in here."""
        if key_id is None:
            if api_keys.is_any(self.store):
                raise ApiError(401, "Missing bearer or basic authentication in header")
            return ANYBODY
        key = api_keys.find(self.store, key_id)
        if key is None or key.revoked_at is not None:
            raise ApiError(401, "Incorrect API key provided: revoked.", code="invalid_api_key")
        return Caller(key.id, key.scope, key.limits)


def caller_of(request: Request) -> Caller:
    """Whose call a request is."""
    caller: Caller = request.state.caller
    return caller
