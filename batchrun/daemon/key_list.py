"""The API keys of a deployment: in the store, and in the file that the gateways follow."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.addresses import is_loopback
from batchrun.errors import ConfigError
from batchrun.files import write_atomically
from batchrun.store import Store, api_keys
from batchrun.store.api_keys import ApiKeyRecord, NewApiKey


@dataclass(frozen=True, slots=True)
class KeyList:
    """Changes the keys of `store`, and publishes those that count in the file at `path`.

    One change at a time, so that the file never lags behind the store.
    """

    store: Store
    path: Path
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

    def publish(self) -> None:
        """Write the file as the store has it. A deployment that never had a key asks for none."""
        keys = api_keys.list_all(self.store)
        listed = [_for_gateways(key) for key in keys if key.revoked_at is None]
        document = json.dumps({"keys": listed if keys else None})
        write_atomically(self.path, document.encode(), mode=0o600)


def _for_gateways(key: ApiKeyRecord) -> dict[str, object]:
    return {
        "id": key.id,
        "sha256": key.sha256,
        "role": key.role,
        "slo_class": key.slo_class,
        "requests_per_minute": key.limits.requests_per_minute,
        "seq": key.seq,
    }
