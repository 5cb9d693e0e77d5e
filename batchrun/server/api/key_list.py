"""Changes of API keys: in the store, and in the file that gateways follow."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.config import Deployment
from batchrun.errors import ConfigError, StoreError
from batchrun.files import write_atomically
from batchrun.keys import is_loopback
from batchrun.store import api_keys
from batchrun.store.api_keys import NO_LIMITS, ApiKeyRecord, KeyLimits, NewApiKey, limits_of
from batchrun.store.database import Store

log = logging.getLogger(__name__)

HEARD_S = 0.5
"""How often daemons of a database look for keys that were changed in another home."""


def limits_in(deployment: Deployment) -> KeyLimits:
    """What user keys may that have no limit of their own."""
    return KeyLimits(**deployment.key_limits.model_dump())


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
        """Let the gateways here hear of keys that are changed elsewhere, until cancelled."""
        trouble = ""
        while True:
            try:
                await asyncio.to_thread(self._publish_alone)
                trouble = ""
            except (StoreError, OSError, ValueError) as error:
                if str(error) != trouble:
                    log.error("the API keys cannot be published: %s", error)
                trouble = str(error)
            await asyncio.sleep(HEARD_S)

    def _publish_alone(self) -> None:
        with self._changing:
            self.publish()

    def publish(self) -> None:
        """Write the file as the store has it. A deployment that never had a key asks for none."""
        keys = api_keys.list_all(self.store)
        listed = [self._for_gateways(key) for key in keys if key.revoked_at is None]
        document = json.dumps({"keys": listed if keys else None})
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
