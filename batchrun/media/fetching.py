"""Images from the web, for callers who are not trusted: only from named hosts, within bounds.

An engine never fetches anything: it is given what came, as a data URL. So what was checked is what
is used, and a host name cannot lead elsewhere the second time it is looked up.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from threading import Thread
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from batchrun.keys import FairDoor
from batchrun.media.hosts import SHOWN_CHARS, ImageHosts
from batchrun.media.images import (
    IMAGE_LIMIT_BYTES,
    ImageError,
    check_scheme,
    data_url,
    is_data_url,
    media_urls,
    with_urls,
    without_cache_names,
)

FETCH_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 5.0
MAX_URLS = 64
"""Addresses of one request."""
MAX_REQUEST_BYTES = 64 << 20
"""What all images that are fetched for one request have together, each as often as it is named."""
MAX_AT_ONCE = 16
"""Fetches from one host, and rows of one owner that wait for their images."""
_CHUNK_BYTES = 64 << 10
_LATER_STATUSES = frozenset({408, 425, 429})
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_Take = Callable[[int], None]
"""Hears how many bytes of an image came, and may refuse them by what it raises."""


class ImageUnreachableError(ImageError):
    """The host of an image does not answer, or not now: another time it may."""


class ImageTurnError(ImageUnreachableError):
    """Others' images from the same host took all turns."""

    http_status = 503


class _CheckedResolver(AbstractResolver):
    """Looks names up as the system does, and lets none lead to an address that is not allowed.

    That may hang: a name is looked up once at a time, in a thread that nothing else waits for.
    """

    def __init__(self, is_allowed: Callable[[str, int], bool]) -> None:
        self._is_allowed = is_allowed
        self._asked: dict[tuple[str, int, int], Future[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        key = (host, port, family)
        answer = self._asked.get(key)
        if answer is None or answer.done():
            answer = Future()
            # It goes on for others where one who waits leaves.
            answer.set_running_or_notify_cancel()
            Thread(target=_look_up, args=(answer, *key), daemon=True).start()
            self._asked[key] = answer
        found = await asyncio.wrap_future(answer)
        for each in found:
            if not self._is_allowed(each["host"].partition("%")[0], port):
                message = f"images may not come from {host!r}: it leads to a private address"
                raise ImageError(message)
        return found

    async def close(self) -> None:
        """Nothing stays open."""


def _look_up(answer: Future[list[ResolveResult]], host: str, port: int, family: int) -> None:
    try:
        found = socket.getaddrinfo(
            host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        places = [
            ResolveResult(
                hostname=host,
                host=socket.getnameinfo(address, _NUMERIC)[0],
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, proto, _, address in found
        ]
    except Exception as error:  # noqa: BLE001 - those who wait are told
        answer.set_exception(error)
    else:
        answer.set_result(places)


class _Room:
    """What is left of `MAX_REQUEST_BYTES` for one request; `on_bytes` hears what is taken."""

    def __init__(self, on_bytes: _Take) -> None:
        self._left_bytes = MAX_REQUEST_BYTES
        self._on_bytes = on_bytes

    def take(self, num_mentions: int, num_bytes: int) -> None:
        """So many bytes more of an image that is named so often. Raises ImageError when the room is
        used up."""
        self._left_bytes -= num_mentions * num_bytes
        if self._left_bytes < 0:
            raise ImageError(
                f"the images of the request are over {MAX_REQUEST_BYTES >> 20} MiB together, each "
                "as often as it is named"
            )
        self._on_bytes(num_mentions * num_bytes)


def _nobody(num_bytes: int) -> None:
    """Hears how many bytes came, and lets them."""


def must_fetch(body: dict[str, Any]) -> bool:
    """Whether a request names what lies elsewhere."""
    return any(not is_data_url(url) for _, url in media_urls(body))


class ImageFetcher:
    """Puts what addresses of images lead to into requests. Used within one event loop; `close` it.

    `hosts` may be replaced at any time.
    """

    def __init__(self, hosts: ImageHosts | None = None) -> None:
        self.hosts = hosts or ImageHosts()
        self._session: aiohttp.ClientSession | None = None
        self._doors = defaultdict[object, FairDoor](lambda: FairDoor(MAX_AT_ONCE))

    async def filled(
        self,
        body: dict[str, Any],
        owner: str = "",
        *,
        on_bytes: _Take = _nobody,
        turn_s: float | None = None,
    ) -> dict[str, Any]:
        """The body with every image in it, under no name of the sender's; itself where it was so.
        Owners, API keys by id, take turns at each host; no image waits for its turn for longer than
        `turn_s`. `on_bytes` is told how many bytes of images come into the body, and may refuse
        them by what it raises.

        Raises ImageError for an image that may not be had or is none, and ImageUnreachableError
        where it may be had another time.
        """
        body = without_cache_names(body)
        named = Counter(each for each in media_urls(body) if not is_data_url(each[1]))
        if not named:
            return body
        for kind, url in named:
            check_scheme(kind, url)
        if len(named) > MAX_URLS:
            raise ImageError(f"a request may name {MAX_URLS} images on the web (got {len(named)})")
        places = [self.hosts.check(url) for _, url in named]
        room = _Room(on_bytes)
        takes = [partial(room.take, num_mentions) for num_mentions in named.values()]
        tasks = [
            asyncio.create_task(self._fetch(place, take, owner, turn_s))
            for place, take in zip(places, takes, strict=True)
        ]
        try:
            images = dict(zip(named, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
        return with_urls(body, lambda *each: images.get(each, each[1]))

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _fetch(self, place: URL, take: _Take, owner: str, turn_s: float | None) -> str:
        shown = str(place)[:SHOWN_CHARS]
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(turn_s):
                    door = self._doors[place.host, place.port]
                    await turn.enter_async_context(door.passed(owner))
            except TimeoutError:
                message = f"the image at {shown} waited for others of its host for {turn_s:g} s"
                raise ImageTurnError(f"{message}; try again") from None
            return await self._fetch_now(place, take, shown)

    async def _fetch_now(self, place: URL, take: _Take, shown: str) -> str:
        try:
            async with (
                asyncio.timeout(FETCH_TIMEOUT_S),
                self._open().get(place, allow_redirects=False) as response,
            ):
                _check_reply(response, shown)
                return data_url(await _read(response, take, shown))
        except TimeoutError:
            message = f"the image at {shown} did not come within {FETCH_TIMEOUT_S:g} s"
            raise ImageUnreachableError(message) from None
        except (aiohttp.ClientError, OSError) as error:
            detail = " ".join(str(error).split()) or type(error).__name__
            raise ImageUnreachableError(f"the image at {shown} cannot be had: {detail}") from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = _CheckedResolver(lambda address, port: self.hosts.allows(address, port))
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, resolver=resolver, use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "image/*", "Accept-Encoding": "identity"},
                auto_decompress=False,
            )
        return self._session


class RowImages:
    """Images of rows that are in flight: of an owner's rows a few at a time, for each keeps a place
    of an engine meanwhile. Jobs that have more are `resting`, by id, with their owner."""

    def __init__(self, fetcher: ImageFetcher) -> None:
        self.resting: dict[str, str] = {}
        self._fetcher = fetcher
        self._num_rows = Counter[str]()

    def may_begin(self, job_id: str, owner: str) -> bool:
        """Whether a row may fetch now; else its job rests until another has done."""
        may_begin = self._num_rows[owner] < MAX_AT_ONCE
        if not may_begin:
            self.resting[job_id] = owner
        return may_begin

    async def filled(self, body: dict[str, Any], owner: str, limit_s: float) -> dict[str, Any]:
        """The body with its images. Raises ImageError and ImageUnreachableError."""
        self._num_rows[owner] += 1
        try:
            async with asyncio.timeout(limit_s):
                return await self._fetcher.filled(body, owner)
        except TimeoutError:
            message = f"the images did not come within the {limit_s:g} s that the row has"
            raise ImageUnreachableError(message) from None
        finally:
            self._num_rows[owner] -= 1
            self._num_rows += Counter()
            for job_id in [each for each, whose in self.resting.items() if whose == owner]:
                del self.resting[job_id]


def _check_reply(response: aiohttp.ClientResponse, shown: str) -> None:
    status, coding = response.status, response.headers.get("Content-Encoding", "identity")
    if status in _LATER_STATUSES or status >= 500:
        raise ImageUnreachableError(f"the image at {shown} cannot be had now: HTTP {status}")
    if 300 <= status < 400:
        raise ImageError(f"the image at {shown} is elsewhere, and redirects are not followed")
    if status != 200:
        raise ImageError(f"the image at {shown} cannot be had: HTTP {status}")
    if coding.lower() != "identity":
        raise ImageError(f"the image at {shown} comes compressed, which was not asked for")


async def _read(response: aiohttp.ClientResponse, take: _Take, shown: str) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        raw += chunk
        take(len(chunk))
        if len(raw) > IMAGE_LIMIT_BYTES:
            raise ImageError(f"the image at {shown} is over {IMAGE_LIMIT_BYTES >> 20} MiB")
    return bytes(raw)
