"""The daemon's HTTP edge."""

from batchrun.api.app import make_app
from batchrun.api.server import serve

__all__ = ["make_app", "serve"]
