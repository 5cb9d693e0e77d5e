"""What goes when its time is over, removed by the daemon from time to time."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from batchrun.errors import StorageError, StoreError
from batchrun.output.api_files import remove_expired, sweep_files
from batchrun.output.file_bytes import FileBytes
from batchrun.output.keeping import find_unused_links
from batchrun.remote import in_thread
from batchrun.store import Store, jobs
from batchrun.store.retention import find_removable, remove_results

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
