"""An engine that answers some rows as no engine should: `python -m benchmarks.evil_engines PORT`.

A row whose prompt is `case NAME row N odd` gets what `ODD_ENGINES` says of NAME. Every other row is
answered well, and in its answer stands its own prompt, so that answers that were mixed up show.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

MODEL = "fake"
ANSWER = "answer"
"""A row may end as an answer; else as an error with one of the codes."""
INVALID = ("invalid_response",)
LOST = ("connection_error",)
MIB = 1 << 20
STUCK_S = 86_400.0
_PROMPT = re.compile(rb"case ([\w-]+) row (\d+) (odd|well)")


@dataclass(frozen=True, slots=True)
class Asked:
    """A call: its prompt and its id."""

    prompt: bytes
    request_id: str = "1"


NOBODY = Asked(b"nobody")
Send = Callable[[asyncio.StreamWriter, Asked], Awaitable[bool]]
"""Answers a call; whether the connection is still of use."""


@dataclass(frozen=True, slots=True)
class OddEngine:
    """`ends`: how a row may end. The first `times` tries of a row are answered oddly, or all."""

    name: str
    ends: tuple[str, ...]
    send: Send
    times: int | None = None


def answered_well(asked: Asked) -> dict[str, object]:
    """The reply of a good engine."""
    text = f"heard {asked.prompt.decode()}"
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return {
        "id": f"chatcmpl-{asked.request_id}",
        "object": "chat.completion",
        "choices": [choice | {"logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def whole(body: bytes, *headers: str, status: str = "200 OK", length: object = None) -> bytes:
    """A reply with its head; `length` is what it says of itself."""
    size = "" if length == "" else f"Content-Length: {len(body) if length is None else length}\r\n"
    more = "".join(f"{header}\r\n" for header in headers)
    kind = "" if "Content-Type" in more else "Content-Type: application/json\r\n"
    return f"HTTP/1.1 {status}\r\n{kind}{size}{more}\r\n".encode() + body


def _raw(content: bytes, then: str = "keep") -> Send:
    """These bytes; then the connection is kept, closed or broken, or nothing comes any more."""

    async def send(writer: asyncio.StreamWriter, _asked: Asked) -> bool:
        writer.write(content)
        await writer.drain()
        if then == "hang":
            await asyncio.sleep(STUCK_S)
        if then == "break":
            writer.transport.abort()
        return then == "keep"

    return send


def _body(*parts: bytes | object, headers: tuple[str, ...] = ()) -> Send:
    """A reply of 200 with this body; what is not bytes is written as JSON."""
    joined = b"".join(
        part if isinstance(part, bytes) else json.dumps(part).encode() for part in parts
    )
    return _raw(whole(joined, *headers))


def _status(status: str, body: object = None, *headers: str) -> Send:
    error = {"error": {"message": "odd", "type": "Odd", "param": None, "code": None}}
    content = body if isinstance(body, bytes) else json.dumps(body or error).encode()
    return _raw(whole(content, *headers, status=status))


def _changed(**changes: object) -> Send:
    """A good reply, but for some of its keys, as Python writes them."""
    reply = answered_well(NOBODY) | changes
    return _body(reply)


def _choice(**changes: object) -> Send:
    choice = {"index": 0, "message": {"content": "odd"}, "finish_reason": "stop"}
    return _changed(choices=[choice | changes])


def _text(literal: bytes) -> Send:
    """A good reply whose content is this, as it stands."""
    return _body(b'{"choices":[{"index":0,"message":{"content":', literal, b"}}]}")


def _pieces(make: Callable[[], AsyncIterator[bytes]], *headers: str) -> Send:
    """A chunked reply whose body comes so."""

    async def send(writer: asyncio.StreamWriter, _asked: Asked) -> bool:
        writer.write(whole(b"", "Transfer-Encoding: chunked", *headers, length=""))
        async for piece in make():
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    return send


async def _drops() -> AsyncIterator[bytes]:
    for byte in json.dumps(answered_well(NOBODY)).encode():
        yield bytes([byte])
        await asyncio.sleep(0.01)


async def _blanks() -> AsyncIterator[bytes]:
    while True:
        yield b" " * MIB


async def _bomb() -> AsyncIterator[bytes]:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    for _ in range(256):
        if piece := packer.compress(b" " * MIB):
            yield piece
    yield packer.flush()


async def _answer_twice(writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """The row's answer, and a little later the same again, which nobody asked for."""
    for _ in range(2):
        writer.write(whole(json.dumps(answered_well(asked)).encode()))
        await writer.drain()
        await asyncio.sleep(0.05)
    return True


async def _answer_early(writer: asyncio.StreamWriter, asked: Asked) -> bool:
    """Two answers in one piece."""
    writer.write(2 * whole(json.dumps(answered_well(asked)).encode()))
    await writer.drain()
    return True


async def _endless_head(writer: asyncio.StreamWriter, _asked: Asked) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(100_000):
        writer.write(f"X-{number}: {'x' * 100}\r\n".encode())
        await writer.drain()
    return False


_GOOD = json.dumps(answered_well(NOBODY)).encode()
_DEEP = b"[" * 600 + b"]" * 600
_OK = (ANSWER,)

ODD_ENGINES = (
    # What is no JSON.
    OddEngine("html", INVALID, _body(b"<html>busy</html>")),
    OddEngine("nothing", INVALID, _body(b"")),
    OddEngine("half", INVALID, _body(_GOOD[:90])),
    OddEngine("utf-16", INVALID, _body(_GOOD.decode().encode("utf-16"))),
    OddEngine("utf-32", INVALID, _body(_GOOD.decode().encode("utf-32"))),
    OddEngine("byte-order-mark", INVALID, _body(b"\xef\xbb\xbf" + _GOOD)),
    OddEngine("latin-1", INVALID, _text(b'"gr\xfcn"')),
    OddEngine("half-character", INVALID, _text(b'"\\ud800"')),
    OddEngine("half-character-reversed", INVALID, _text(b'"\\udc00\\ud800"')),
    OddEngine("cesu-8", INVALID, _text(b'"\xed\xa0\x80\xed\xb0\x80"')),
    OddEngine("overlong-utf-8", INVALID, _text(b'"\xc0\x80"')),
    OddEngine("not-a-number", INVALID, _body(b'{"choices":[{"message":{"content":"x"},"p":NaN}]}')),
    OddEngine("infinity", INVALID,
        _body(b'{"choices":[{"message":{"content":"x"},"p":-Infinity}]}')),
    OddEngine("deep", INVALID, _text(_DEEP)),
    OddEngine("deeper", INVALID, _text(b'{"a":' * 100_000)),
    OddEngine("long-number", INVALID, _text(b"9" * 5_000)),
    OddEngine("raw-nul", INVALID, _text(b'"\0"')),
    OddEngine("raw-line-feed", INVALID, _text(b'"\n"')),
    OddEngine("more-behind", INVALID, _body(_GOOD, b"x")),
    OddEngine("two-documents", INVALID, _body(_GOOD, _GOOD)),
    OddEngine("single-quotes", INVALID, _body(_GOOD.replace(b'"', b"'"))),
    OddEngine("comment", INVALID, _body(b"/* odd */", _GOOD)),
    OddEngine("comma", INVALID, _body(_GOOD[:-1] + b",}")),
    OddEngine("packed-unsaid", INVALID, _body(gzip.compress(_GOOD))),
    OddEngine("events", INVALID,
        _body(b"data: ", _GOOD, b"\n\n", headers=("Content-Type: text/event-stream",))),
    OddEngine("many-parts", INVALID, _text(b"[" + b"{}," * (11 * MIB) + b"{}]")),
    # JSON, and no reply.
    OddEngine("list", INVALID, _body(b"[1]")),
    OddEngine("string", INVALID, _body(b'"yes"')),
    OddEngine("null", INVALID, _body(b"null")),
    OddEngine("empty-object", INVALID, _body(b"{}")),
    OddEngine("choices-null", INVALID, _changed(choices=None)),
    OddEngine("choices-empty", INVALID, _changed(choices=[])),
    OddEngine("choices-text", INVALID, _changed(choices=["yes"])),
    OddEngine("choices-object", INVALID, _changed(choices={"0": {}})),
    OddEngine("error-of-200", INVALID, _body({"error": {"message": "odd"}})),
    OddEngine("aborted", ("aborted",), _choice(finish_reason="abort")),
    OddEngine("broken", ("aborted",), _choice(finish_reason="error")),
    # Odd answers, but answers.
    OddEngine("content-null", _OK, _choice(message={"content": None})),
    OddEngine("content-list", _OK, _choice(message={"content": [{"text": "odd"}]})),
    OddEngine("message-missing", _OK, _changed(choices=[{}])),
    OddEngine("reason-list", _OK, _choice(finish_reason=["stop"])),
    OddEngine("reason-long", _OK, _choice(finish_reason="s" * 10_000)),
    OddEngine("reason-nul", _OK, _choice(finish_reason="a\0b")),
    OddEngine("reason-half-character", INVALID, _choice(finish_reason="\ud800")),
    OddEngine("key-twice", _OK, _body(b'{"usage":1,"usage":null,', _GOOD[1:])),
    OddEngine("id-of-another", _OK, _changed(id="../../x\0")),
    OddEngine("usage-huge", _OK,
        _changed(usage={"prompt_tokens": 2**62, "completion_tokens": 10**400})),
    OddEngine("usage-negative", _OK,
        _changed(usage={"prompt_tokens": -5, "completion_tokens": -(2**70)})),
    OddEngine("usage-text", _OK, _changed(usage={"prompt_tokens": "7", "completion_tokens": [3]})),
    OddEngine("usage-float", _OK,
        _changed(usage={"prompt_tokens": 1.5, "completion_tokens": 1e300})),
    OddEngine("reasoning-huge", _OK,
        _changed(usage={"completion_tokens_details": {"reasoning_tokens": 10**300}})),
    OddEngine("reasoning-list", _OK,
        _changed(usage={"completion_tokens_details": {"reasoning_tokens": [1]}})),
    OddEngine("nul-in-text", _OK, _choice(message={"content": "a\0b"})),
    OddEngine("escapes-in-text", _OK, _choice(message={"content": "\x1b]0;odd\7\x9b31m\u202e"})),
    OddEngine("line-separators", _OK, _text('"a\u2028b\u2029c\u0085d"'.encode())),
    OddEngine("many-lines", _OK,
        _body(json.dumps(json.loads(_GOOD), indent="\t").replace("\n", "\r\n").encode())),
    OddEngine("long", _OK, _choice(message={"content": "x" * 1_500_000})),
    # Statuses.
    *(OddEngine(f"status-{code}", (f"http_{code}", "Odd"), _status(f"{code} Odd"))
      for code in (400, 402, 403, 404, 405, 410, 413, 415, 418, 422, 451, 500, 501, 502, 504, 599)),
    OddEngine("status-401", ("http_401", "Odd"),
        _status("401 Odd", None, "WWW-Authenticate: Negotiate")),
    OddEngine("elsewhere", ("http_302",),
        _status("302 Found", b"", "Location: http://127.0.0.1:1/")),
    OddEngine("round-in-circles", ("http_307",),
        _status("307 Again", b"", "Location: /v1/chat/completions")),
    OddEngine("not-modified", (*LOST, "http_304"), _raw(whole(b"", status="304 Same"))),
    OddEngine("no-content", INVALID, _raw(whole(b"", status="204 None", length=""))),
    OddEngine("status-error-odd", ("http_400",),
        _status("400 Odd", b'{"error":{"message":{"a":["\\u001b[31m"]},"code":[1],"type":7}}')),
    OddEngine("status-error-half", ("http_400",),
        _status("400 Odd", b'{"error":{"message":"\\ud800"}}')),
    OddEngine("status-error-long", ("http_400", "Odd"),
        _status("400 Odd", {"error": {"message": "x" * 3_000_000, "type": "Odd"}})),
    OddEngine("busy", _OK, _status("503 Odd", None, "Retry-After: 0"), times=2),
    OddEngine("busy-odd-date", _OK,
        _status("429 Odd", None, "Retry-After: Mon, 01 Jan 0001 00:00:00 +9999"), times=1),
    OddEngine("busy-not-a-number", _OK, _status("429 Odd", None, "Retry-After: nan"), times=1),
    OddEngine("busy-negative", _OK, _status("503 Odd", None, "Retry-After: -1e400"), times=1),
    # HTTP that is none.
    OddEngine("hangs-up", LOST, _raw(b"", "close")),
    OddEngine("breaks", LOST, _raw(b"", "break")),
    OddEngine("half-a-head", LOST, _raw(b"HTTP/1.1 200 O", "close")),
    OddEngine("head-alone", LOST, _raw(whole(b"", length=99), "close")),
    OddEngine("half-a-body", LOST, _raw(whole(_GOOD[:50], length=len(_GOOD)), "close")),
    OddEngine("half-a-body-broken", LOST, _raw(whole(_GOOD[:50], length=len(_GOOD)), "break")),
    OddEngine("body-too-long", _OK, _raw(whole(_GOOD, length=len(_GOOD) + 99), "hang"), times=1),
    OddEngine("body-too-short", (*INVALID, *LOST), _raw(whole(_GOOD, length=40), "close")),
    OddEngine("length-negative", LOST, _raw(whole(_GOOD, length=-1), "close")),
    OddEngine("length-text", LOST, _raw(whole(_GOOD, length="many"), "close")),
    OddEngine("length-twice", LOST, _raw(whole(_GOOD, "Content-Length: 3"), "close")),
    OddEngine("length-and-chunks", (*LOST, *_OK),
        _raw(whole(_GOOD, "Transfer-Encoding: chunked"), "close")),
    OddEngine("no-length", _OK, _raw(whole(_GOOD, length=""), "close")),
    OddEngine("chunks-without-end", LOST,
        _raw(whole(b"5\r\n{\"a\":\r\n", "Transfer-Encoding: chunked", length=""), "close")),
    OddEngine("chunk-size-odd", LOST,
        _raw(whole(b"xyz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=""), "close")),
    OddEngine("chunk-size-huge", LOST,
        _raw(whole(b"fffffffffffffffff\r\n{}", "Transfer-Encoding: chunked", length=""), "close")),
    OddEngine("drop-by-drop", _OK, _pieces(_drops)),
    OddEngine("long-head", LOST, _raw(whole(_GOOD, "X-Odd: " + "x" * 200_000))),
    OddEngine("endless-head", LOST, _endless_head),
    OddEngine("nul-in-head", LOST, _raw(whole(_GOOD, "X-Odd: a\0b"), "close")),
    OddEngine("no-http", LOST, _raw(b"SSH-2.0-OpenSSH_9.2\r\n", "close")),
    OddEngine("body-without-head", LOST, _raw(_GOOD, "close")),
    OddEngine("status-of-no-number", LOST, _raw(b"HTTP/1.1 abc OK\r\n\r\n", "close")),
    OddEngine("continue-first", _OK, _raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + whole(_GOOD))),
    OddEngine("packed", _OK, _raw(whole(gzip.compress(_GOOD), "Content-Encoding: gzip"))),
    OddEngine("packed-badly", LOST, _raw(whole(_GOOD, "Content-Encoding: gzip"), "close")),
    OddEngine("packing-unknown", INVALID, _raw(whole(b"\x01\x02", "Content-Encoding: odd"))),
    OddEngine("bomb", ("response_too_large",), _pieces(_bomb, "Content-Encoding: gzip")),
    OddEngine("endless", ("response_too_large",), _pieces(_blanks)),
    OddEngine("answers-twice", _OK, _answer_twice),
    OddEngine("answers-early", _OK, _answer_early),
    OddEngine("stops", ("timeout", "connection_error"), _raw(b"", "hang")),
    OddEngine("stops-in-the-head", ("timeout", "connection_error"), _raw(b"HTTP/1.1 200", "hang")),
)  # fmt: skip
STUCK = frozenset({"stops", "stops-in-the-head"})
"""Rows that only a timeout or a cancellation ends."""


_HUGE = "9" * 400
_MODELS = f'{{"object": "list", "data": [{{"id": "{MODEL}", "max_model_len": {_HUGE}}}]}}'
_METRICS = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{_HUGE}"}} 1.0\n'
"""What the engine tells of itself, whatever it answers."""


class EvilEngine:
    """Serves one address."""

    def __init__(self) -> None:
        self._odd = {engine.name.encode(): engine for engine in ODD_ENGINES}
        self._tries: Counter[bytes] = Counter()

    async def serve(self, port: int) -> None:
        """For ever."""
        server = await asyncio.start_server(self.serve_connection, "127.0.0.1", port, limit=MIB)
        await server.serve_forever()

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until a reply ends the connection."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"(?i)content-length: *(\d+)", head)
                body = await reader.readexactly(int(found[1]) if found else 0)
                if not await self._answer(head, body, writer):
                    break
        writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if head.startswith(b"GET"):
            told = _MODELS if b"/v1/models" in head else _METRICS if b"/metrics" in head else ""
            writer.write(whole(told.encode()))
            return True
        found, named = _PROMPT.search(body), re.search(rb"(?i)x-request-id: *(\S+)", head)
        prompt = b"nobody" if found is None else found[0]
        asked = Asked(prompt, "1" if named is None else named[1].decode())
        odd = None if found is None or found[3] != b"odd" else self._odd[found[1]]
        self._tries[prompt] += 1
        if odd is None or (odd.times is not None and self._tries[prompt] > odd.times):
            writer.write(whole(json.dumps(answered_well(asked)).encode()))
            await writer.drain()
            return True
        return await odd.send(writer, asked)


if __name__ == "__main__":
    asyncio.run(EvilEngine().serve(int(sys.argv[1])))
