"""Calls that ask for more than the default: bounds of a class, or to run as offline work.

What they ask for reaches an engine's scheduler as a hint in `vllm_xargs`, with the secret of that
engine, so that such a body is written anew for the engine that gets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchrun.gateway.hints import (
    HINT_KEYS,
    is_too_much,
    may_hold,
    parse_without_hints,
    strip_hints,
)
from batchrun.gateway.slo_classes import SloBounds
from batchrun.gateway.upstreams import Upstream
from batchrun.types import HINT_KEY, HINT_VERSION

RESPONSES = "/v1/responses"
STEERED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES})
"""The routes on which vLLM hands `vllm_xargs` to its scheduler."""
TIER = "service_tier"
FLEX = "flex"


@dataclass(frozen=True, slots=True)
class SteeredBody:
    """The body of such a call. `bounds` None: those that the engines have by default."""

    route: str
    document: Mapping[str, Any]
    bounds: SloBounds | None
    is_flex: bool

    def tier_at(self, upstream: Upstream) -> str | None:
        """What the reply of this engine says of the tier; None where nothing was asked."""
        if not self.is_flex:
            return None
        return FLEX if upstream.runs_offline_calls else "default"

    def written_for(self, upstream: Upstream) -> bytes:
        """The body as this engine gets it."""
        body = dict(self.document)
        if self.is_flex:
            self._write_tier(body, upstream)
        others = body.get("vllm_xargs")
        if upstream.hint_nonce is not None and (others is None or isinstance(others, dict)):
            hint = {"v": HINT_VERSION, "nonce": upstream.hint_nonce, **self._asked()}
            body["vllm_xargs"] = {**(others or {}), HINT_KEY: json.dumps(hint)}
        return json.dumps(body).encode()

    def _write_tier(self, body: dict[str, Any], upstream: Upstream) -> None:
        """vLLM repeats the tier of a response, and knows none on the other routes."""
        if self.route == RESPONSES:
            body[TIER] = self.tier_at(upstream)
        else:
            body.pop(TIER)
        if upstream.offline_priority is not None:
            body["priority"] = upstream.offline_priority

    def _asked(self) -> dict[str, object]:
        if self.is_flex:
            return {"class": "offline", "job": None}
        assert self.bounds is not None
        return {"class": "online", "slo": asdict(self.bounds)}


def read_call_body(route: str, body: bytes, bounds: SloBounds | None) -> bytes | SteeredBody:
    """The body without a caller's hints, steered if it asks for something that the route has.

    It is parsed only where it may ask or hold hints; one too large for that has the default
    bounds. Raises InputError and RefusalError.
    """
    if bounds is not None and is_too_much(body):
        bounds = None
    if bounds is None and not may_hold(body, *HINT_KEYS, TIER.encode()):
        return body
    if route not in STEERED_ROUTES or (bounds is None and not may_hold(body, TIER.encode())):
        return strip_hints(body)
    document = parse_without_hints(body)
    is_flex = document.get(TIER) == FLEX
    if bounds is None and not is_flex:
        return strip_hints(body)
    return SteeredBody(route, document, bounds, is_flex)
