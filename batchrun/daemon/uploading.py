"""The end of a job in object storage: tried until the storage takes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from batchrun.daemon.patience import until_reached
from batchrun.errors import StorageUnreachableError
from batchrun.remote import in_thread
from batchrun.store import JobRecord, Store, jobs
from batchrun.types import ProgressSink

log = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


async def until_uploaded(
    upload: Callable[[], None], store: Store, record: JobRecord, progress: ProgressSink
) -> None:
    """Call `upload` in a thread; while the storage does not answer, wait, say so, and try again.

    Raises StorageUnreachableError once the job's state is another (it was cancelled or paused), and
    what else `upload` raises.
    """
    delay_s = FIRST_DELAY_S
    while True:
        progress("uploading", 0, 0)
        try:
            await in_thread(upload)
            return
        except StorageUnreachableError as error:
            log.warning("%s: %s", record.id, error)
            progress(f"{record.state}, waiting to upload: {error}", 0, 0)
            now = await until_reached(jobs.get, store, record.id)
            if now.state is not record.state:
                raise
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
