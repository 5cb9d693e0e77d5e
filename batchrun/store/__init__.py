"""The durable store: jobs, append-only results, and the lock that keeps two daemons apart."""

from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.store.lock import StoreLock
from batchrun.store.results import Counts, StoredResult

__all__ = ["Counts", "JobRecord", "NewJob", "Store", "StoreLock", "StoredResult", "open_store"]
