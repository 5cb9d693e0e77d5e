"""Reads the hints of requests that arrive inside vLLM."""

from __future__ import annotations

from vllm.v1.request import Request

from batchrun.hints import HINT_KEY, Hint, HintError, read_hint


class HintReader:
    """Reads the hints that carry `nonce`, and counts those that make no sense."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.num_malformed = 0

    def read(self, request: Request) -> Hint | None:
        """The request's hint; None without one, and for a hint that makes no sense."""
        params = request.sampling_params
        if params is None or request.resumable or not params.extra_args:
            return None
        try:
            return read_hint(params.extra_args.get(HINT_KEY), self.nonce)
        except HintError:
            self.num_malformed += 1
            return None
