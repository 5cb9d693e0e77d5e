"""The HTTP client of an engine: one class for managed, attached and fake ones."""

from __future__ import annotations

import asyncio
import json
import time
from urllib.parse import urlsplit

import aiohttp

from batchrun.engine.kv_config import KvConfig, parse_kv_config
from batchrun.engine.reply import Reply, classify, failure
from batchrun.errors import ConfigError, EngineError
from batchrun.types import Outcome, OutcomeKind, Request, RowError

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 2.0
# Below the 5 s after which uvicorn closes an idle connection: a POST that meets the closing fails.
_KEEP_ALIVE_S = 2.0
_CHUNK_BYTES = 256 * 1024
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class ResponseTooLargeError(EngineError):
    """The engine's reply is longer than `MAX_RESPONSE_BYTES`."""


class EngineClient:
    """Sends requests to one engine. Used within one event loop; `close` it at the end."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        """`base_url` is the engine's address, with or without `/v1`. Raises ConfigError."""
        self.base_url = _normalise_url(base_url)
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def execute(self, request: Request, *, timeout_s: float | None = None) -> Outcome:
        """Run one request and say what came of it.

        Waits as long as the engine holds the response open, or for `timeout_s`. Raises nothing but
        CancelledError. Both close the connection, upon which the engine aborts the request.
        """
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                reply = await self._post(request, start_s)
        except ResponseTooLargeError as error:
            row_error = RowError("response_too_large", str(error))
            return _failed(request, OutcomeKind.ROW_ERROR, row_error, start_s)
        except (TypeError, ValueError, RecursionError) as error:
            row_error = RowError("invalid_request", f"the request is not valid JSON: {error}")
            return _failed(request, OutcomeKind.ROW_ERROR, row_error, start_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            row_error = RowError("connection_error", self._explain(error))
            if limit.expired():
                row_error = RowError("timeout", f"no answer within {timeout_s:g} s")
            return _failed(request, OutcomeKind.RETRY, row_error, start_s)
        return classify(request, reply, now_s=time.time())

    async def models(self) -> tuple[str, ...]:
        """The ids that the engine serves. Raises EngineError when it does not tell."""
        url = f"{self.base_url}/v1/models"
        try:
            async with self._open().get(url, timeout=_check_timeout()) as response:
                response.raise_for_status()
                document = await response.json(content_type=None)
            return tuple(str(model["id"]) for model in document["data"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(self._explain(error)) from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{url} does not list models as an OpenAI server does") from error

    async def kv_config(self) -> KvConfig | None:
        """What the engine says of its KV cache; None where it says nothing.

        Raises EngineError when it does not answer.
        """
        url = f"{self.base_url}/metrics"
        try:
            async with self._open().get(url, timeout=_check_timeout()) as response:
                if not response.ok:
                    return None
                page = await _read_bounded(response)
            return parse_kv_config(page.decode("utf-8", "replace"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(self._explain(error)) from error
        except ValueError:
            return None

    async def is_healthy(self) -> bool:
        """Whether `GET /health` answers 2xx within 2 s."""
        try:
            url = f"{self.base_url}/health"
            async with self._open().get(url, timeout=_check_timeout()) as response:
                return response.ok
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def close(self) -> None:
        """Close all connections; requests in flight end as lost connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, request: Request, start_s: float) -> Reply:
        data = _ENCODER.encode(dict(request.body)).encode()
        async with self._open().post(
            self.base_url + request.endpoint,
            data=data,
            headers={"X-Request-Id": request.request_id, "Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            body = await _read_bounded(response)
            retry_after = response.headers.get("Retry-After")
            duration_s = time.monotonic() - start_s
            return Reply(response.status, body, retry_after, duration_s)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, aiohttp.ClientResponseError):
            return f"the engine at {self.base_url} answered HTTP {error.status}"
        detail = " ".join(str(error).split()) or type(error).__name__
        return f"no answer from the engine at {self.base_url}: {detail}"


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise ResponseTooLargeError(f"the reply is over {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def _failed(request: Request, kind: OutcomeKind, error: RowError, start_s: float) -> Outcome:
    return failure(request, kind, error, duration_s=time.monotonic() - start_s)


def _check_timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)


def _normalise_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ConfigError(f"engine url {base_url!r}: write it as http://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1")
