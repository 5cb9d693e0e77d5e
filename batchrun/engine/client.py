"""The HTTP client of all engines, what a reply means for its row, and how much KV an engine has."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from batchrun import types
from batchrun.engine.progress import SILENCE, Look, look_at_page
from batchrun.errors import ConfigError, EngineError, InputError
from batchrun.media.connections import CleanConnector, parse_retry_after
from batchrun.strict import LARGE_JSON_BYTES, parse_reply
from batchrun.types import Outcome, OutcomeKind, Request, RowError, Usage

METRIC = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The KV cache of one engine. `num_blocks` is None where the engine does not tell."""

    block_tokens: int
    num_blocks: int | None
    is_prefix_caching_on: bool

    @property
    def num_tokens(self) -> int | None:
        return None if self.num_blocks is None else self.num_blocks * self.block_tokens


def parse_kv_config(metrics: str) -> KvConfig | None:
    """Read a page of metrics in Prometheus's text format; None where it says nothing of the KV.

    Raises ValueError when the page is no such text.
    """
    lines = [line for line in metrics.splitlines() if line.startswith(METRIC)]
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    labels = next((sample.labels for family in families for sample in family.samples), {})
    block_tokens = types.token_count_in(labels.get("block_size", ""))
    num_blocks = types.token_count_in(labels.get("num_gpu_blocks", ""))
    if not block_tokens:
        return None
    return KvConfig(
        block_tokens=block_tokens,
        num_blocks=num_blocks if types.token_count(num_blocks * block_tokens) else None,
        is_prefix_caching_on=labels.get("enable_prefix_caching") == "True",
    )


_RESULT_KEYS = {
    "/v1/chat/completions": "choices",
    "/v1/completions": "choices",
    "/v1/embeddings": "data",
    "/v1/responses": "output",
}
OF_ANOTHER = "the engine's reply is to another request"
_BUSY_STATUSES = frozenset({429, 503})
_RETRY_STATUSES = frozenset({408, 409, 425})
_JOB_STATUSES = frozenset({401, 403, 404})
_REASONS = {"incomplete": "length", "max_output_tokens": "length", "failed": "error"}
_REASONS |= dict.fromkeys(("cancelled", "in_progress", "queued"), "abort")
"""What a response says of its end, in the words of other endpoints."""
_UNFINISHED_REASONS = frozenset({"abort", "error"})
_MAX_MESSAGE_CHARS = 2_000
_AS_SPACES = dict.fromkeys([*range(32), *range(127, 160)], " ")


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole HTTP reply. `duration_s` is the time from send to last byte."""

    status_code: int
    body: bytes
    retry_after: str | None
    duration_s: float


def classify(request: Request, reply: Reply, *, now_s: float) -> Outcome:
    """The outcome of `reply`; `now_s` (UTC epoch) turns a `Retry-After` date into seconds."""
    if 200 <= reply.status_code < 300:
        return _classify_success(request, reply)
    error = _read_error(reply)
    return failure(
        request,
        _kind_of_error(reply.status_code, error),
        error,
        duration_s=reply.duration_s,
        retry_after_s=parse_retry_after(reply.retry_after, now_s=now_s),
    )


def failure(
    request: Request,
    kind: OutcomeKind,
    error: RowError,
    *,
    duration_s: float,
    retry_after_s: float | None = None,
) -> Outcome:
    """An outcome without an answer."""
    return Outcome(
        job_id=request.job_id,
        row=request.row,
        attempt=request.attempt,
        kind=kind,
        error=error,
        duration_s=duration_s,
        retry_after_s=retry_after_s,
    )


def _classify_success(request: Request, reply: Reply) -> Outcome:
    document = _parse_object(reply.body)
    key = _RESULT_KEYS.get(request.endpoint)
    code, problem, finish_reason = "invalid_response", _find_problem(document, key), None
    if document is not None and not problem and _is_of_another(request, document.get("id")):
        problem = OF_ANOTHER
    if document is not None and not problem:
        finish_reason = _finish_reason(document, key)
    if document is not None and finish_reason in _UNFINISHED_REASONS:
        code, problem = "aborted", f"the engine gave the row up (finish_reason {finish_reason})"
        if isinstance(told := document.get("error"), dict) and told.get("message"):
            problem += f": {_one_line(told['message'])}"
    if document is None or problem:
        error = RowError(code, problem, reply.status_code)
        return failure(request, OutcomeKind.RETRY, error, duration_s=reply.duration_s)
    return Outcome(
        job_id=request.job_id,
        row=request.row,
        attempt=request.attempt,
        kind=OutcomeKind.OK,
        body=reply.body,
        finish_reason=finish_reason,
        usage=_read_usage(document),
        duration_s=reply.duration_s,
    )


def _is_of_another(request: Request, reply_id: object) -> bool:
    """Whether a reply's id names another request of ours: vLLM makes it of the request's own id."""
    names_one = isinstance(reply_id, str) and "batchrun-" in reply_id
    return names_one and request.request_id not in str(reply_id)


def _find_problem(document: dict[str, object] | None, key: str | None) -> str:
    if document is None:
        return "the engine's reply is not a JSON object"
    if key is None:
        return ""
    results = document.get(key)
    if not isinstance(results, list):
        return f"the engine's reply has no {key!r}"
    if key == "choices" and not (results and all(isinstance(item, dict) for item in results)):
        return "the engine's reply has no usable 'choices'"
    return ""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


def _parse_object(body: bytes) -> dict[str, object] | None:
    try:
        document = parse_reply(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _finish_reason(document: dict[str, object], key: str | None) -> str | None:
    if key == "output":
        end, details = _REASONS.get(str(document.get("status"))), document.get("incomplete_details")
        why = str(details.get("reason") or "") if isinstance(details, dict) else ""
        return _REASONS.get(why, why) if why and end not in _UNFINISHED_REASONS else end
    choices = document["choices"] if key == "choices" else None
    reason = choices[0].get("finish_reason") if isinstance(choices, list) else None
    return reason if isinstance(reason, str) else None


def _read_usage(document: dict[str, object]) -> Usage:
    usage, choices = document.get("usage"), document.get("choices")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return Usage(
        num_prompt_tokens=_first_count(usage, "prompt_tokens", "input_tokens"),
        num_output_tokens=_first_count(usage, "completion_tokens", "output_tokens"),
        num_cached_tokens=_first_count(details, "cached_tokens"),
        num_choices=len(choices) if isinstance(choices, list) else 0,
    )


def _first_count(counts: object, *keys: str) -> int:
    told = counts if isinstance(counts, Mapping) else {}
    return next((count for key in keys if (count := types.token_count(told.get(key)))), 0)


def _kind_of_error(status_code: int, error: RowError) -> OutcomeKind:
    if status_code in _BUSY_STATUSES:
        return OutcomeKind.BUSY
    if status_code >= 500 or status_code in _RETRY_STATUSES:
        return OutcomeKind.RETRY
    if status_code < 400 or status_code in _JOB_STATUSES or _is_unknown_model(error):
        return OutcomeKind.JOB_ERROR
    return OutcomeKind.ROW_ERROR


def _is_unknown_model(error: RowError) -> bool:
    message = error.message.lower()
    return error.code == "model_not_found" or (
        message.startswith("the model ") and "does not exist" in message
    )


def _read_error(reply: Reply) -> RowError:
    """Reads OpenAI's `{"error": {...}}`, the flat `{"message": ...}` and `{"detail": ...}`."""
    document = _parse_object(reply.body) or {}
    inner = document.get("error", document)
    fields = inner if isinstance(inner, dict) else {"message": inner}
    message = fields.get("message") or fields.get("detail") or _as_text(reply.body)
    return RowError(
        code=_error_code(fields, reply.status_code),
        message=_one_line(message) or f"the engine answered HTTP {reply.status_code}",
        status_code=reply.status_code,
        type=_text_or_none(fields.get("type")),
        param=_text_or_none(fields.get("param")),
    )


def _text_or_none(value: object) -> str | None:
    return (_one_line(value) or None) if isinstance(value, str) else None


def _error_code(fields: Mapping[str, object], status_code: int) -> str:
    for key in ("code", "type"):
        value = _text_or_none(fields.get(key))
        if value is not None and not value.isdigit():
            return value
    return f"http_{status_code}"


def _as_text(body: bytes) -> str:
    return body[:_MAX_MESSAGE_CHARS].decode("utf-8", errors="replace")


def _one_line(message: object) -> str:
    """Text for people, without control characters; PostgreSQL takes no NUL."""
    text = message if isinstance(message, str) else json.dumps(message)
    return " ".join(text[:_MAX_MESSAGE_CHARS].translate(_AS_SPACES).split())


MAX_RESPONSE_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 5.0
_CHECK_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# Below the 5 s after which uvicorn closes an idle connection: a POST that meets the closing fails.
_KEEP_ALIVE_S = 2.0
_REPLY_IDLE_S = 60.0
"""A reply that has begun breaks off when nothing more of it comes for so long."""
_CHUNK_BYTES = 64 * 1024
LONG_REPLY_BYTES = 64 * 1024
_SLOW_S, _SLOW_BYTES_PER_S = 10.0, 32 * 1024
"""A long reply, which takes room, breaks off where it comes more slowly for so long."""
Room = Callable[[], AbstractAsyncContextManager[None]]
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
BODY_CODE = "invalid_request"
"""The code of the error with which a row ends whose body is no JSON."""


def encode_body(body: Mapping[str, object]) -> bytes:
    """A request's body as it is sent. Raises InputError."""
    try:
        return _ENCODER.encode(dict(body)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the request is not valid JSON: {error}") from None


class ResponseTooLargeError(EngineError):
    """The engine's reply is longer than `MAX_RESPONSE_BYTES`."""


class EngineClient:
    """Sends requests to one engine. Used within one event loop; `close` it at the end."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        reply_idle_s: float = _REPLY_IDLE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`base_url` is the engine's address, with or without `/v1`. Raises ConfigError."""
        self.context_tokens: dict[str, int | None] = {}
        """What its models take, prompt and answer together, as it told last."""
        self.reply_idle_s = reply_idle_s
        self.base_url = normalise_url(base_url)
        self.api_key = api_key
        self._tls = tls
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._num_answered = 0

    async def execute(
        self,
        request: Request,
        *,
        data: bytes | None = None,
        timeout_s: float | None = None,
        room: Room = nullcontext,
    ) -> Outcome:
        """Run one request and say what came of it. `data` is its body, where that is JSON already.

        Waits as long as the engine holds the response open, or for `timeout_s`. What a reply holds
        beyond `LONG_REPLY_BYTES` is taken in within `room`, for which it waits as long as it takes.
        Raises nothing but CancelledError, and EngineError where an agent stands between and has
        lost the request. All of them close the connection, which aborts the request.
        """
        async with AsyncExitStack() as held:
            return await self._execute(
                request, data, timeout_s, lambda: held.enter_async_context(room())
            )

    async def _execute(
        self,
        request: Request,
        data: bytes | None,
        timeout_s: float | None,
        on_long: Callable[[], Awaitable[None]],
    ) -> Outcome:
        start_s = time.monotonic()

        async def wait_for_room() -> None:
            began_s, ends_at_s = time.monotonic(), limit.when()
            limit.reschedule(None)
            await on_long()
            if ends_at_s is not None:
                limit.reschedule(ends_at_s + time.monotonic() - began_s)

        try:
            data = encode_body(request.body) if data is None else data
            async with asyncio.timeout(timeout_s) as limit:
                reply = await self._post(request, data, start_s, wait_for_room)
        except ResponseTooLargeError as error:
            kind, row_error = OutcomeKind.ROW_ERROR, RowError("response_too_large", str(error))
        except InputError as error:
            kind, row_error = OutcomeKind.ROW_ERROR, RowError(BODY_CODE, str(error))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            kind, row_error = OutcomeKind.RETRY, RowError("connection_error", self._explain(error))
            if limit.expired():
                row_error = RowError("timeout", f"no answer within {timeout_s:g} s")
        else:
            self._num_answered += reply.status_code < 300
            work = partial(classify, request, reply, now_s=time.time())
            is_large = len(reply.body) > LARGE_JSON_BYTES
            outcome = await asyncio.to_thread(work) if is_large else work()
            if outcome.error is not None and outcome.error.message == OF_ANOTHER:
                connector = self._open().connector
                assert isinstance(connector, CleanConnector)
                connector.doubt_all()
            return outcome
        return failure(request, kind, row_error, duration_s=time.monotonic() - start_s)

    async def models(self) -> tuple[str, ...]:
        """The ids that the engine serves. Raises EngineError when it does not tell."""
        status_code, body = await self._get("/v1/models")
        if status_code >= 400:
            raise EngineError(f"the engine at {self.base_url} answered HTTP {status_code}")
        try:
            listed = msgspec.convert(_parse_object(body), _ModelList)
        except msgspec.ValidationError as error:
            raise EngineError(
                f"{self.base_url}/v1/models does not list models as an OpenAI server does"
            ) from error
        told = {model.id: types.token_count(model.max_model_len) for model in listed.data}
        self.context_tokens = {model: length or None for model, length in told.items()}
        return tuple(told)

    async def kv_config(self) -> KvConfig | None:
        """What it says of its KV cache, None: nothing. Raises EngineError without an answer."""
        try:
            return parse_kv_config(await self.metrics())
        except ValueError:
            return None

    async def look(self) -> Look:
        """What its metrics show, and its answers; `SILENCE` when it does not tell within 2 s."""
        try:
            look = look_at_page(await self.metrics())
        except EngineError:
            return SILENCE
        return replace(look, mark=(look.mark, self._num_answered))

    async def metrics(self) -> str:
        """Its page of metrics, empty where it has none. Raises EngineError without an answer."""
        status_code, page = await self._get("/metrics")
        return page.decode("utf-8", "replace") if status_code < 400 else ""

    async def is_healthy(self) -> bool:
        """Whether `GET /health` answers 2xx within 2 s."""
        try:
            status_code, _ = await self._get("/health")
        except EngineError:
            return False
        return status_code < 400

    async def close(self) -> None:
        """Close all connections; requests in flight end as lost connections."""
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _get(self, path: str) -> tuple[int, bytes]:
        """(status code, body) within 2 s. Raises EngineError when there is no answer."""
        try:
            async with self._open().get(self.base_url + path, timeout=_CHECK_TIMEOUT) as response:
                return response.status, await _read_bounded(response, self.reply_idle_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(self._explain(error)) from error

    async def _post(
        self, request: Request, data: bytes, start_s: float, on_long: Callable[[], Awaitable[None]]
    ) -> Reply:
        async with self._open(keeps=request.attempt <= 1).post(
            self.base_url + request.endpoint,
            data=data,
            headers={"X-Request-Id": request.request_id, "Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            body = await _read_bounded(response, self.reply_idle_s, on_long)
            retry_after = response.headers.get("Retry-After")
            duration_s = time.monotonic() - start_s
            return Reply(response.status, body, retry_after, duration_s)

    def _open(self, *, keeps: bool = True) -> aiohttp.ClientSession:
        """One that keeps connections. What is tried again gets one of its own: on a kept one may
        come what belongs to another."""
        if keeps not in self._sessions:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            how = {"keepalive_timeout": _KEEP_ALIVE_S} if keeps else {"force_close": True}
            self._sessions[keeps] = aiohttp.ClientSession(
                connector=CleanConnector(limit=0, ssl=self._tls or True, **how),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._sessions[keeps]

    def _explain(self, error: BaseException) -> str:
        detail = " ".join(str(error).split()) or type(error).__name__
        return f"no answer from the engine at {self.base_url}: {detail}"


async def _read_bounded(
    response: aiohttp.ClientResponse,
    idle_s: float,
    on_long: Callable[[], Awaitable[None]] | None = None,
) -> bytes:
    """Raises ClientPayloadError when the reply stops coming, and ResponseTooLargeError."""
    body = bytearray()
    ends_at_s = math.inf
    while not response.content.at_eof():
        left_s = ends_at_s + len(body) / _SLOW_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(min(idle_s, left_s)) as limit:
                body += await response.content.read(_CHUNK_BYTES)
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f"no more came for {idle_s:g} s" if idle_s < left_s else "it came too slowly"
            line = f"the reply broke off after {len(body)} bytes: {why}"
            raise aiohttp.ClientPayloadError(line) from error
        if len(body) > LONG_REPLY_BYTES and on_long is not None:
            await on_long()
            on_long = None
            ends_at_s = time.monotonic() + _SLOW_S - len(body) / _SLOW_BYTES_PER_S
        if len(body) > MAX_RESPONSE_BYTES:
            raise ResponseTooLargeError(f"the reply is over {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def normalise_url(base_url: str) -> str:
    """A server's address without `/v1`. Raises ConfigError when it is none."""
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ConfigError(f"engine url {base_url!r}: write it as http://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1")
