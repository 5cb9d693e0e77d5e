"""A refusal that says which value of a call is wrong."""

from __future__ import annotations

from aiohttp import web


class CallRefusedError(web.HTTPBadRequest):
    """A call with a value that is not allowed; `code` and `param` go into the envelope."""

    def __init__(self, message: str, *, code: str, param: str) -> None:
        super().__init__(text=message)
        self.code = code
        self.param = param
