"""Which addresses images may come from, and what is done to fetch one."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest
import pytest_asyncio
from aiohttp import web
from image_builders import bomb, data_url_of, image_body, picture

from batchrun.media.fetching import (
    MAX_AT_ONCE,
    MAX_URLS,
    ImageFetcher,
    ImageTurnError,
    ImageUnreachableError,
    RowImages,
)
from batchrun.media.hosts import ImageHosts, checked_host, is_public
from batchrun.media.images import IMAGE_LIMIT_BYTES, ImageError, media_urls
from benchmarks.hostile_urls import HOSTILE_URLS, HOSTS

PICTURE = picture()


@pytest.mark.parametrize("url", HOSTILE_URLS)
async def test_a_hostile_address_is_refused(url: str) -> None:
    fetcher = ImageFetcher(ImageHosts(HOSTS))
    with pytest.raises(ImageError) as caught:
        await fetcher.filled(image_body(url))
    await fetcher.close()
    assert not isinstance(caught.value, ImageUnreachableError)
    assert "\n" not in str(caught.value)


def test_there_are_forty_of_them() -> None:
    assert len(set(HOSTILE_URLS)) >= 40


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.0.2.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b:1::7f00:1", False),
        ("fec0::1", False),
        ("5f00::1", False),
        ("3fff::1", False),
    ],
)
def test_an_address_is_public_with_all_that_it_holds(address: str, public: bool) -> None:  # noqa: FBT001
    assert is_public(ip_address(address)) is public


NO_HOSTS = [
    "",
    "http://a",
    "a/b",
    "user@a",
    "a:x",
    "a?b",
    "a b",
    "a:0",
    "a:1:2",
    "a#b",
    "a,b",
    ".a",
]


@pytest.mark.parametrize("entry", NO_HOSTS)
def test_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{re.escape(entry)}' is not HOST or HOST:PORT$"):
        checked_host(entry)


@pytest.mark.parametrize("entry", ["*", "*.example.com", "images-*.example.com:443"])
def test_a_pattern_of_hosts_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="no pattern of hosts is possible: name each"):
        checked_host(entry)


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("images.example.com", "https://images.example.com/a.png"),
        ("Images.Example.com", "http://IMAGES.example.com./a.png"),
        ("images.example.com:8080", "http://images.example.com:8080/a.png"),
        ("10.0.0.1", "http://10.0.0.1/a.png"),
        ("::1", "http://[0:0::1]/a.png"),
        ("[::1]:8080", "http://[::1]:8080/a.png"),
        ("image_host", "http://image_host/a.png"),
        ("bücher.example", "http://xn--bcher-kva.example/a.png"),
    ],
)
def test_a_listed_host_is_allowed(entry: str, url: str) -> None:
    hosts = ImageHosts([entry])
    assert hosts.check(url)
    with pytest.raises(ImageError):
        ImageHosts().check(url)


def test_a_name_may_lead_to_a_listed_address_and_port() -> None:
    hosts = ImageHosts(["images.corp", "10.0.0.1", "10.0.0.2:9000"])
    assert hosts.allows("10.0.0.1", 443) and hosts.allows("10.0.0.2", 9000)
    assert not hosts.allows("10.0.0.1", 9000) and not hosts.allows("10.0.0.2", 80)
    assert not hosts.allows("10.0.0.3", 80) and not hosts.allows("localhost", 80)


class Host:
    """A web server of images on this machine that notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request.path)
        await self.is_open.wait()
        replies = {
            "/a.png": web.Response(body=PICTURE),
            "/moved.png": web.Response(status=302, headers={"Location": self.url("a.png")}),
            "/large.png": web.Response(body=bytes(IMAGE_LIMIT_BYTES + 1)),
            "/packed.png": web.Response(body=PICTURE, headers={"Content-Encoding": "gzip"}),
            "/bomb.png": web.Response(body=bomb(9_000, 9_000)),
            "/page.png": web.Response(text="<html>"),
            "/busy.png": web.Response(status=503),
        }
        return replies.get(request.path, web.Response(status=404))


@asynccontextmanager
async def serving() -> AsyncIterator[Host]:
    made = Host()
    runner = web.ServerRunner(web.Server(made.answer))
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    made.port = listener.getsockname()[1]
    yield made
    await runner.cleanup()


@pytest_asyncio.fixture
async def host() -> AsyncIterator[Host]:
    async with serving() as made:
        yield made


async def fill(urls: list[str], hosts: list[str]) -> list[str]:
    """The addresses in the body that the engine gets."""
    fetcher = ImageFetcher(ImageHosts(hosts))
    try:
        return [url for _, url in media_urls(await fetcher.filled(image_body(*urls)))]
    finally:
        await fetcher.close()


async def test_an_image_of_a_listed_host_comes_with_the_request(host: Host) -> None:
    urls = [host.url("a.png"), data_url_of(picture(1)), host.url("a.png")]
    filled = await fill(urls, [f"127.0.0.1:{host.port}"])
    assert filled == [data_url_of(PICTURE), urls[1], data_url_of(PICTURE)]
    assert host.asked == ["/a.png"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("moved.png", "redirects are not followed"),
        ("large.png", "over 32 MiB"),
        ("packed.png", "compressed"),
        ("bomb.png", "million pixels"),
        ("page.png", "of no known format"),
        ("absent.png", "HTTP 404"),
        ("busy.png", "HTTP 503"),
    ],
)
async def test_what_is_not_an_image_to_be_had_is_refused(
    host: Host, path: str, problem: str
) -> None:
    with pytest.raises(ImageError, match=problem) as caught:
        await fill([host.url(path)], [f"127.0.0.1:{host.port}"])
    assert isinstance(caught.value, ImageUnreachableError) == (path == "busy.png")
    assert host.asked == [f"/{path}"]


async def test_a_listed_name_that_leads_to_this_machine_is_not_asked(host: Host) -> None:
    with pytest.raises(ImageError, match="leads to a private address"):
        await fill([f"http://localhost:{host.port}/a.png"], [f"localhost:{host.port}"])
    assert host.asked == []


async def test_a_host_that_does_not_answer_may_answer_later(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    with pytest.raises(ImageUnreachableError, match="cannot be had"):
        await fill([f"http://127.0.0.1:{port}/a.png"], [f"127.0.0.1:{port}"])


async def test_a_name_that_is_slow_to_look_up_holds_up_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over, threads = threading.Event(), list[threading.Thread]()

    def look_up(*_: object, **__: object) -> None:
        threads.append(threading.current_thread())
        is_over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    urls = [f"http://slow.test/{number}.png" for number in range(3)]
    filling = asyncio.create_task(fill(urls, ["slow.test"]))
    try:
        while not threads:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.to_thread(str), 60)
    finally:
        is_over.set()
    with pytest.raises(ImageUnreachableError, match="no answer"):
        await filling
    assert [thread.daemon for thread in threads] == [True]


async def test_a_host_that_hangs_holds_up_calls_for_its_own_images_only_and_not_for_long(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.media.fetching.FETCH_TIMEOUT_S", 600.0)
    host.is_open.clear()
    async with serving() as other:
        fetcher = ImageFetcher(ImageHosts([f"127.0.0.1:{each.port}" for each in (host, other)]))
        urls = [host.url(f"{number}.png") for number in range(MAX_AT_ONCE)]
        hanging = asyncio.create_task(fetcher.filled(image_body(*urls)))
        while len(host.asked) < MAX_AT_ONCE:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(fetcher.filled(image_body(other.url("a.png")), "b"), 60)
        with pytest.raises(ImageTurnError, match=r"for 0\.01 s; try again"):
            await fetcher.filled(image_body(host.url("a.png")), "b", turn_s=0.01)
        host.is_open.set()
        with pytest.raises(ImageError, match="HTTP 404"):
            await hanging
        await fetcher.close()


async def test_a_request_may_name_so_many_images(host: Host) -> None:
    urls = [host.url(f"{number}.png") for number in range(MAX_URLS + 1)]
    with pytest.raises(ImageError, match="64 images"):
        await fill(urls, [f"127.0.0.1:{host.port}"])
    assert host.asked == []


async def test_an_image_counts_as_often_as_the_request_names_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.media.fetching.MAX_REQUEST_BYTES", 3 * len(PICTURE) - 1)
    fetcher = ImageFetcher(ImageHosts([f"127.0.0.1:{host.port}"]))
    url, heard = host.url("a.png"), list[int]()
    await fetcher.filled(image_body(url, url), on_bytes=heard.append)
    assert sum(heard) == 2 * len(PICTURE)
    with pytest.raises(ImageError, match="together, each as often as it is named"):
        await fetcher.filled(image_body(url, url, url))
    await fetcher.close()


async def test_a_deep_request_gets_its_images(host: Host) -> None:
    nested: list[object] = []
    for _ in range(5_000):
        nested = [nested]
    fetcher = ImageFetcher(ImageHosts([f"127.0.0.1:{host.port}"]))
    body = image_body(host.url("a.png"))
    body["messages"].append(nested)
    filled = await fetcher.filled(body)
    await fetcher.close()
    assert [url for _, url in media_urls(filled)] == [data_url_of(PICTURE)]


async def test_of_each_owner_a_few_rows_wait_for_images_and_their_jobs_rest(host: Host) -> None:
    url = host.url("a.png")
    fetcher = ImageFetcher(ImageHosts([f"127.0.0.1:{host.port}"]))
    images = RowImages(fetcher)
    host.is_open.clear()
    rows = []
    while images.may_begin("one", "a"):
        rows.append(asyncio.create_task(images.filled(image_body(url), "a", 60)))
        await asyncio.sleep(0)
    assert len(rows) == MAX_AT_ONCE and images.resting == {"one": "a"}
    assert images.may_begin("two", "b")
    with pytest.raises(ImageUnreachableError, match=r"within the 0\.01 s that the row has"):
        await images.filled(image_body(url), "b", 0.01)
    assert images.resting == {"one": "a"}
    host.is_open.set()
    await asyncio.gather(*rows)
    assert images.resting == {} and images.may_begin("one", "a")
    await fetcher.close()


async def test_a_text_is_passed_on_as_it_is() -> None:
    body = {"messages": [{"role": "user", "content": "http://127.0.0.1/a.png"}]}
    assert await ImageFetcher().filled(body) is body
