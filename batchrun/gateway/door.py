"""Whether a call may come in: its API key, and how often that key may call."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from batchrun.gateway.call_meter import CallMeter
from batchrun.gateway.callers import ApiKey, KeyRing
from batchrun.gateway.rate_limits import RequestRates
from batchrun.gateway.refusal import RefusalError
from batchrun.key_usage import UsageFile

log = logging.getLogger(__name__)

COUNTED_PREFIX = "/v1/"
"""Calls below this count as requests of their key."""


@dataclass(frozen=True, slots=True)
class AboutCaller:
    """What the gateway knows of a caller: his key, None where none is asked for, the headers that
    every reply tells him of his limits, and what counts the call."""

    key: ApiKey | None = None
    reply_headers: Mapping[str, str] = field(default_factory=dict)
    meter: CallMeter | None = None


ABOUT_CALLER = web.RequestKey("about_caller", AboutCaller)
"""Where a request keeps it."""


@dataclass(frozen=True, slots=True)
class Door:
    """Lets callers in; `rates` and `usage` are None where no keys can be asked for."""

    keys: KeyRing
    rates: RequestRates | None = None
    usage: UsageFile | None = None

    def admit(self, request: web.BaseRequest) -> AboutCaller:
        """Who calls. Raises RefusalError with 401, 403 or 429."""
        path = request.rel_url.raw_path
        key = self.keys.admit(request.headers.get("Authorization"), path)
        if key is None or self.rates is None or self.usage is None:
            return AboutCaller(key)
        meter = CallMeter(self.usage, key.seq)
        if key.requests_per_minute is None or not path.startswith(COUNTED_PREFIX):
            return AboutCaller(key, meter=meter)
        try:
            rate = self.rates.take(key.seq, key.requests_per_minute, now_s=time.monotonic())
        except OSError as error:
            log.warning("requests of key %s are not counted: %s", key.id, error)
            return AboutCaller(key, meter=meter)
        if rate.retry_after_s is not None:
            message = (
                f"Rate limit reached for requests of this API key. Limit: {rate.limit} a minute. "
                f"Please try again in {rate.retry_after_s:.3g}s."
            )
            refusal = RefusalError(429, message, code="rate_limit_exceeded", kind="requests")
            raise refusal.with_headers(rate.headers)
        return AboutCaller(key, rate.headers, meter)
