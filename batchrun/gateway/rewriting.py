"""What is changed in the reply to a steered call: its tier is said, a secret of ours is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from batchrun.errors import EngineError
from batchrun.gateway.redaction import Redaction
from batchrun.gateway.tier_reply import TierInBody, TierInEvents


class Filter(Protocol):
    """Changes a stream of bytes."""

    def feed(self, chunk: bytes) -> bytes:
        """What can be handed on once `chunk` has come."""
        ...

    def end(self) -> bytes:
        """The rest."""
        ...


@dataclass(frozen=True, slots=True)
class Rewriting:
    """`tier`: what the reply is to say (None: nothing); `secret`: what it must not say."""

    tier: str | None = None
    secret: str | None = field(default=None, repr=False)

    def filters_for(self, reply: aiohttp.ClientResponse) -> list[Filter]:
        """What the reply runs through, in order. Raises EngineError if it cannot be read."""
        if reply.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise EngineError("the engine compressed its answer, though it was asked not to")
        filters: list[Filter] = []
        if self.tier is not None and reply.status == 200:
            is_stream = reply.content_type == "text/event-stream"
            filters.append(TierInEvents(self.tier) if is_stream else TierInBody(self.tier))
        if self.secret is not None:
            filters.append(Redaction(self.secret))
        return filters


def feed_all(filters: list[Filter], chunk: bytes) -> bytes:
    """The chunk after all filters."""
    for each in filters:
        chunk = each.feed(chunk)
    return chunk


def end_all(filters: list[Filter]) -> bytes:
    """What the filters still held, in order."""
    rest = b""
    for each in filters:
        rest = each.feed(rest) + each.end()
    return rest
