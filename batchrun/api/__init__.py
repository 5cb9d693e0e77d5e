"""The daemon's HTTP edge."""

from batchrun.api.app import make_app
from batchrun.api.server import DaemonAddress, read_address, serve

__all__ = ["DaemonAddress", "make_app", "read_address", "serve"]
