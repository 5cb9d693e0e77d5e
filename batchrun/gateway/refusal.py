"""A call that the gateway answers itself, with what the envelope and the headers say."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from batchrun.gateway.envelope import error_body
from batchrun.gateway.headers import REQUEST_ID


class RefusalError(Exception):
    """Raised for a call that goes nowhere; `kind` is the error's type in the envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self._body = error_body(status, message, code=code, kind=kind, param=param)
        self._headers: Mapping[str, str] = {}

    def with_headers(self, headers: Mapping[str, str]) -> RefusalError:
        """The same refusal, whose reply carries these headers too."""
        self._headers = headers
        return self

    def response(self, request_id: str) -> web.Response:
        """The whole reply."""
        return web.Response(
            status=self.status,
            body=self._body,
            content_type="application/json",
            headers={**self._headers, REQUEST_ID: request_id},
        )
