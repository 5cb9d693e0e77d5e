"""Changes of API keys: in the store, and in the file that gateways follow."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, field
from functools import partial
from operator import add
from pathlib import Path

import msgspec

from batchrun.config import Deployment
from batchrun.errors import ConfigError, StoreError
from batchrun.files import write_atomically
from batchrun.keys import OnlineUsage, UsageFile, is_loopback
from batchrun.store import api_keys
from batchrun.store.api_keys import NO_LIMITS, ApiKeyRecord, KeyLimits, NewApiKey, limits_of
from batchrun.store.database import Store
from batchrun.store.jobs import list_settings, read_setting, write_setting

log = logging.getLogger(__name__)

NO_LIST = json.dumps({"keys": None})
HEARD_S, TELL_S = 0.5, 5.0
"""How often daemons of a database look for keys that were changed in another home, and tell what
their gateways count: in settings whose keys begin with `USAGE_PREFIX`."""
USAGE_PREFIX = "usage:"


def online_usage(store: Store, path: Path) -> dict[int, OnlineUsage]:
    """What online calls have used, by the number of the key: at the gateway that counts in the file
    at `path`, and at those of other daemons as they told last."""
    with closing(UsageFile(path)) as usage:
        told = list_settings(store, USAGE_PREFIX) | {usage.id: usage.read_all()}
    sums: defaultdict[int, OnlineUsage] = defaultdict(OnlineUsage)
    for counts in msgspec.convert(told, dict[str, dict[str, list[int]]]).values():
        for seq, used in counts.items():
            sums[int(seq)] = OnlineUsage(*map(add, astuple(sums[int(seq)]), used))
    return sums


def tell_usage(store: Store, path: Path) -> None:
    """Tell those on the same database what the file at `path` counts, unless they know."""
    with closing(UsageFile(path)) as usage:
        key, counts = USAGE_PREFIX + usage.id, usage.read_all()
    if counts != read_setting(store, key, {}):
        write_setting(store, key, counts)


def asks_for_none(path: Path) -> bool:
    """Whether gateways that follow the file at `path` let in everybody."""
    return not path.exists() or path.read_text() == NO_LIST


def limits_in(deployment: Deployment) -> KeyLimits:
    """What user keys may that have no limit of their own."""
    return KeyLimits(**deployment.key_limits.model_dump())


_LIMIT_WORDS = {
    "requests_per_minute": "{:,} requests a minute",
    "concurrent_calls": "{:,} calls at once",
    "concurrent_batches": "{:,} batches at once",
    "enqueued_tokens": "{:,} tokens in batches",
    "stored_bytes": "{:,} bytes stored",
    "max_weight": "weight {:g}",
    "min_deadline_s": "deadline {:g} s",
}


def limit_lines(limits: Mapping[str, float | None]) -> list[str]:
    """The limits that hold, for people."""
    given = ((words, limits[name]) for name, words in _LIMIT_WORDS.items())
    return [words.format(value) for words, value in given if value is not None]


@dataclass(frozen=True, slots=True)
class KeyList:
    """Changes the keys of `store`, and publishes those that count in the file at `path`.

    One change at a time, so that the file never lags behind the store. `defaults` are the limits
    of user keys that have none of their own.
    """

    store: Store
    path: Path
    defaults: KeyLimits = NO_LIMITS
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def check(self, host: str) -> None:
        """Raises ConfigError when callers from outside could reach `host` without a key."""
        if not is_loopback(host) and not api_keys.list_all(self.store):
            raise ConfigError(
                f"listen: {host} can be reached from other machines, and there is no API key yet; "
                "make one with `batchrun keys create NAME`, or listen on 127.0.0.1"
            )

    def add(self, key: NewApiKey) -> ApiKeyRecord:
        """Add a key; gateways know it within a second. Raises InputError. Blocking."""
        with self._changing:
            added = api_keys.add(self.store, key, now_s=time.time())
            self.publish()
            return added

    def change(self, key: str, values: Mapping[str, object]) -> ApiKeyRecord:
        """Change limits or class of a key; gateways know it within a second. Raises InputError and
        StateError. Blocking."""
        with self._changing:
            changed = api_keys.change(self.store, key, values)
            self.publish()
            return changed

    def revoke(self, key: str) -> ApiKeyRecord:
        """Revoke a key; gateways know it within a second. Raises InputError and StateError.

        One that is revoked already is published again: whoever revoked it may have been killed.
        Blocking.
        """
        with self._changing:
            try:
                return api_keys.revoke(self.store, key, now_s=time.time())
            finally:
                self.publish()

    async def keep_published(self) -> None:
        """Let the gateways here hear of keys that are changed elsewhere, and others what keys have
        used here, until cancelled."""
        tell = partial(tell_usage, self.store, self.path.with_suffix(".usage"))
        async with asyncio.TaskGroup() as group:
            group.create_task(_keep_on(tell, TELL_S, "what API keys have used cannot be told"))
            await _keep_on(self._publish_alone, HEARD_S, "the API keys cannot be published")

    def _publish_alone(self) -> None:
        with self._changing:
            self.publish()

    def publish(self) -> None:
        """Write the file as the store has it. A deployment that never had a key asks for none: one
        that had, and whose store was brought back from before, lets nobody in."""
        keys = api_keys.list_all(self.store)
        listed = [self._for_gateways(key) for key in keys if key.revoked_at is None]
        document = json.dumps({"keys": listed})
        if not keys and asks_for_none(self.path):
            document = NO_LIST
        if not self.path.exists() or self.path.read_text() != document:
            write_atomically(self.path, document.encode(), mode=0o600)

    def _for_gateways(self, key: ApiKeyRecord) -> dict[str, object]:
        limits = limits_of(key, self.defaults)
        return {
            "id": key.id,
            "sha256": key.sha256,
            "role": key.role,
            "slo_class": key.slo_class,
            "requests_per_minute": limits.requests_per_minute,
            "concurrent_calls": limits.concurrent_calls,
            "seq": key.seq,
        }


async def _keep_on(work: Callable[[], None], rest_s: float, failure: str) -> None:
    """Do it again and again; the same trouble is logged once."""
    trouble = ""
    while True:
        try:
            await asyncio.to_thread(work)
            trouble = ""
        except (StoreError, OSError, ValueError) as error:
            if str(error) != trouble:
                log.error("%s: %s", failure, error)
            trouble = str(error)
        await asyncio.sleep(rest_s)
