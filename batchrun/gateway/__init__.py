"""The online endpoint: a stateless proxy in front of the engines, a process of its own."""

from batchrun.gateway.hints import strip_hints
from batchrun.gateway.server import serve
from batchrun.gateway.settings import GatewaySettings
from batchrun.gateway.upstreams import Upstream, read_upstreams

__all__ = ["GatewaySettings", "Upstream", "read_upstreams", "serve", "strip_hints"]
