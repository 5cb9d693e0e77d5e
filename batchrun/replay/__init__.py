"""Online traffic to measure with: a trace of arrivals, sent to a chat endpoint on time."""

from batchrun.replay.client import ReplayTarget, replay
from batchrun.replay.recorded import arrivals_of
from batchrun.replay.results import OnlineResult, summarize
from batchrun.replay.trace import Arrival, TokenRange, TraceShape, generate_trace

__all__ = [
    "Arrival",
    "OnlineResult",
    "ReplayTarget",
    "TokenRange",
    "TraceShape",
    "arrivals_of",
    "generate_trace",
    "replay",
    "summarize",
]
