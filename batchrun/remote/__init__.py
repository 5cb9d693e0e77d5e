"""Object storage: `s3://` and what else is allowed of what fsspec serves."""

from batchrun.remote import objects
from batchrun.remote.threads import in_thread
from batchrun.remote.urls import check_place, check_prefix, is_url, name_of

__all__ = ["check_place", "check_prefix", "in_thread", "is_url", "name_of", "objects"]
