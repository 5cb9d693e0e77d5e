"""The API keys of a deployment, its switch for offline work, and removal of what is outdated."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.daemon.dispatcher import Dispatcher
from batchrun.daemon.engine_link import Slot, Steering
from batchrun.daemon.job import ActiveJob
from batchrun.errors import ConfigError, StorageError, StoreError
from batchrun.files import write_atomically
from batchrun.jobs.objects import in_thread
from batchrun.jobs.results.file_bytes import FileBytes, remove_expired, sweep_files
from batchrun.jobs.results.keeping import find_unused_links
from batchrun.keys import is_loopback
from batchrun.store import api_keys, jobs
from batchrun.store.api_keys import ApiKeyRecord, NewApiKey
from batchrun.store.database import Store
from batchrun.store.retention import find_removable, remove_results


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


SETTING = "offline"
SIT_OUT_S = 30.0
"""So long rows may sit in an engine while offline work is off; then they are taken back."""


@dataclass(slots=True)
class OfflineSwitch:
    """Turns offline work on and off. `restore` it before anything runs."""

    store: Store
    slots: Sequence[Slot]
    dispatcher: Dispatcher
    steering: Steering
    active: Mapping[int, ActiveJob]
    _sit_out_until_s: float | None = None

    def restore(self) -> None:
        """As it was when the last daemon ended."""
        is_on = bool(jobs.read_setting(self.store, SETTING, True))
        self.dispatcher.is_offline_on = self.steering.is_offline_on = is_on

    async def set(self, *, on: bool) -> None:
        """Turn all offline work on or off, durably.

        Off: rows in engines with batchrun's scheduler sit out from the next step on and go on with
        `on`; after `SIT_OUT_S`, and in other engines at once, they are aborted and pending again.
        """
        await asyncio.to_thread(jobs.write_setting, self.store, SETTING, on)
        self.dispatcher.is_offline_on = on
        obeying = await self.steering.switch(on=on)
        busy = {slot.engine.name for slot in self.slots if slot.window.num_rows}
        patience_s = SIT_OUT_S if busy <= obeying else 0.0
        self._sit_out_until_s = None if on else time.monotonic() + patience_s
        await self.take_back_rows()
        self.dispatcher.wake()

    async def take_back_rows(self) -> None:
        """Abort what has sat out for long enough."""
        if self._sit_out_until_s is None or time.monotonic() < self._sit_out_until_s:
            return
        self._sit_out_until_s = None
        for job in list(self.active.values()):
            await self.dispatcher.abort(job)


log = logging.getLogger(__name__)

INTERVAL_S = 3600.0
EXPIRY_INTERVAL_S = 60.0


async def remove_old_results(store: Store, links: Path, *, age_s: float | None) -> None:
    """Remove, now and every hour, the results of jobs that ended `age_s` ago, and the links of
    inputs that nothing needs; cancel to end. None keeps everything."""
    while age_s is not None:
        try:
            await asyncio.to_thread(_remove, store, links, age_s)
        except (StoreError, OSError) as error:
            log.error("old results could not be removed: %s", error)
        await asyncio.sleep(INTERVAL_S)


async def remove_expired_files(store: Store, place: FileBytes | None) -> None:
    """Remove, now and every minute, the files of OpenAI's API that have expired, and finish what
    object storage did not take at once; cancel to end."""
    while place is not None:
        try:
            removed = await in_thread(remove_expired, store, place, now_s=time.time())
            for file in removed:
                log.info("%s expired", file.id)
            await in_thread(sweep_files, store, place)
        except (StoreError, StorageError, OSError) as error:
            log.error("files are not where they should be: %s", error)
        await asyncio.sleep(EXPIRY_INTERVAL_S)


def _remove(store: Store, links: Path, age_s: float) -> None:
    """Rows first, files after: what a kill leaves is found again by the next call."""
    now_s = time.time()
    for record in find_removable(store, ended_before_s=now_s - age_s):
        for _ in remove_results(store, record, now_s=now_s):
            pass
        log.info("%s: its results were removed", record.id)
    for link in find_unused_links(jobs.list_jobs(store), links=links, now_s=now_s):
        link.path.unlink(missing_ok=True)
