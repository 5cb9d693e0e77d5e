"""Which headers cross the gateway, and request ids."""

from __future__ import annotations

import re
import uuid

from multidict import CIMultiDict, CIMultiDictProxy

from batchrun.gateway.upstreams import Upstream

REQUEST_ID = "X-Request-Id"
CLASS_HEADER = "X-Batchrun-Class"

HOP_BY_HOP = frozenset({
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
})
STEERING = "X-Vllm-Priority"
"""vLLM takes a call's priority from this header before it looks at the body."""
SET_BY_CLIENT_LIBRARY = frozenset({"host", "content-length", "expect"})
_USABLE_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_OWN_PREFIX = "batchrun"
_OWN_HEADERS = "x-batchrun-"


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without the headers of one connection, those that `Connection` names included, and
    without those that batchrun's processes say something to each other with."""
    named = {
        token.strip().lower()
        for value in headers.getall("Connection", [])
        for token in value.split(",")
    }
    dropped = HOP_BY_HOP | named
    return CIMultiDict(
        (key, value)
        for key, value in headers.items()
        if (name := key.lower()) not in dropped and not name.startswith(_OWN_HEADERS)
    )


def without_key(headers: CIMultiDictProxy[str]) -> CIMultiDictProxy[str]:
    """A caller's headers without his API key, which is for the gateway alone."""
    rest = CIMultiDict(headers)
    rest.popall("Authorization", None)
    return CIMultiDictProxy(rest)


def request_headers(
    headers: CIMultiDictProxy[str], *, request_id: str, upstream: Upstream
) -> CIMultiDict[str]:
    """What the engine sees of a caller's headers.

    The request id is always set: the engine would otherwise take one from the body, where a
    caller could write an id of the daemon's.
    """
    sent = end_to_end(headers)
    for key in (*SET_BY_CLIENT_LIBRARY, STEERING):
        sent.popall(key, None)
    sent[REQUEST_ID] = request_id
    if upstream.api_key is not None:
        sent["Authorization"] = f"Bearer {upstream.api_key}"
    return sent


def choose_request_id(headers: CIMultiDictProxy[str]) -> str:
    """The caller's id if there is exactly one and it is usable, else a new one.

    Ids that begin with `batchrun` are the daemon's and never come from outside.
    """
    given = headers.getall(REQUEST_ID, [])
    is_usable = len(given) == 1 and _USABLE_REQUEST_ID.fullmatch(given[0]) is not None
    if is_usable and not given[0].lower().startswith(_OWN_PREFIX):
        return given[0]
    return new_request_id()


def new_request_id() -> str:
    """An id of the gateway's own."""
    return f"req_{uuid.uuid4().hex}"
