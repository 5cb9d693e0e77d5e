"""The API keys of a deployment: in the store, and in the file that the gateways follow."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from batchrun.addresses import is_loopback
from batchrun.errors import ConfigError
from batchrun.files import write_atomically
from batchrun.store import Store, api_keys
from batchrun.store.api_keys import ApiKeyRecord, NewApiKey


@dataclass(frozen=True, slots=True)
class KeyList:
    """Changes the keys of `store`, and writes those that count to `path`."""

    store: Store
    path: Path

    def write(self, *, host: str) -> None:
        """Write the file as the store has it. A deployment that never had a key asks for none.

        Raises ConfigError when callers from outside could then reach `host`.
        """
        keys = api_keys.list_all(self.store)
        if not keys and not is_loopback(host):
            raise ConfigError(
                f"listen: {host} can be reached from other machines, and there is no API key yet; "
                "make one with `batchrun keys create NAME`, or listen on 127.0.0.1"
            )
        self._write()

    async def add(self, key: NewApiKey) -> ApiKeyRecord:
        """Add a key; gateways know it within a second. Raises InputError."""
        added = await asyncio.to_thread(api_keys.add, self.store, key, now_s=time.time())
        await asyncio.to_thread(self._write)
        return added

    async def revoke(self, key: str) -> ApiKeyRecord:
        """Revoke a key; gateways know it within a second. Raises InputError and StateError."""
        revoked = await asyncio.to_thread(api_keys.revoke, self.store, key, now_s=time.time())
        await asyncio.to_thread(self._write)
        return revoked

    def _write(self) -> None:
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
