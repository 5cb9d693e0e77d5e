"""The durable store: jobs, append-only results, and the lock that keeps two daemons apart."""

from batchrun.store.check import Violation, check_store, readable_jobs
from batchrun.store.counts import Counts
from batchrun.store.daemon_lock import DaemonLock
from batchrun.store.database import Store, name_of, open_store, open_to_read
from batchrun.store.job_record import JobRecord, NewJob
from batchrun.store.lock import StoreLock
from batchrun.store.placing import open_for
from batchrun.store.results import StoredResult

__all__ = [
    "Counts",
    "DaemonLock",
    "JobRecord",
    "NewJob",
    "Store",
    "StoreLock",
    "StoredResult",
    "Violation",
    "check_store",
    "name_of",
    "open_for",
    "open_store",
    "open_to_read",
    "readable_jobs",
]
