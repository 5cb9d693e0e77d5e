"""The gateway's small parts: the list of engines, the choice among them, addresses, envelopes."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from batchrun.errors import ConfigError
from batchrun.hints import SloBounds
from batchrun.keys import is_loopback
from batchrun.server.gateway.admission import choose_class
from batchrun.server.gateway.app import parse_listen
from batchrun.server.gateway.envelope import as_envelope
from batchrun.server.gateway.http import STALLED_READER_S, GatewayProtocol, bind
from batchrun.server.gateway.replies import Rewriting
from batchrun.server.gateway.upstreams import FollowedFile, Upstream, Upstreams, read_upstreams

ONE, TWO = Upstream("one", "http://h:1"), Upstream("two", "http://h:2")


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_engines_are_read_in_file_order(tmp_path: Path) -> None:
    engines = [
        {"name": "one", "url": "http://h:1/"},
        {"name": "k", "url": "https://h", "api_key": "s"},
    ]
    path = write(tmp_path / "f", {"engines": engines, "daemon": None})
    assert read_upstreams(path).engines == (ONE, Upstream("k", "https://h", "s"))


def test_a_list_names_the_secrets_of_agents(tmp_path: Path) -> None:
    agent = {"name": "a", "url": "https://h:1", "secret_file": "/s", "certificate": None}
    path = write(tmp_path / "f", json.dumps({"engines": [agent]}))

    assert read_upstreams(path).engines == (Upstream("a", "https://h:1", None, Path("/s")),)


def test_an_agents_secret_that_changed_is_used_from_then_on(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("1" * 64)
    upstream = Upstream("a", "https://h:1", secret_file=secret)
    before = upstream.tls()
    assert upstream.tls() is before
    (tmp_path / "next").touch(0o600)
    (tmp_path / "next").write_text("2" * 64)
    (tmp_path / "next").rename(secret)
    assert upstream.tls() is not before
    secret.unlink()
    with pytest.raises(ConfigError, match="secret"):
        upstream.tls()


def test_secrets_of_engines_are_not_in_their_repr() -> None:
    assert "s3cret" not in repr(Upstream("one", "http://h", "s3cret", hint_nonce="s3cret"))
    assert "s3cret" not in repr(Rewriting("flex", "s3cret"))


def test_the_header_comes_before_the_class_of_the_key_and_that_before_the_default() -> None:
    classes = {"fast": SloBounds(0.1, 0.02), "slow": SloBounds(9.0, 1.0, 60.0)}

    def choose(key_class: str | None, **headers: str) -> SloBounds | None:
        given = CIMultiDictProxy(CIMultiDict(headers))
        return choose_class(given, key_class, classes)

    assert choose(None) is None
    assert choose("fast") == classes["fast"]
    assert choose("fast", **{"X-BATCHRUN-class": "slow"}) == classes["slow"]
    assert choose("fast", **{"x-batchrun-class": "default"}) is None
    assert choose("removed") is None
    assert choose("default") is None


async def test_classes_follow_the_file_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path, lists = tmp_path / "f", list[Upstreams]()
    file = FollowedFile(path, read_upstreams, lists.append)
    good = {"fast": {"ttft_s": 0.1, "tpot_s": 0.02, "jct_s": None}}
    for classes in (good, {"fast": {"ttft_s": 0.1}}, {"fast": 3}, ["fast"]):
        write(path, {"engines": [{"name": "one", "url": "http://h:1"}], "slo_classes": classes})
        await file.refresh()

    assert lists == [Upstreams((ONE,), slo_classes={"fast": SloBounds(0.1, 0.02)})]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("{", "not a list of engines: Input data was truncated"),
        ("[" * 100_000, "not a list of engines"),
        ([], "Expected `object`, got `array`"),
        ({}, "missing required field `engines`"),
        ({"engines": [1]}, r"Expected `object`, got `int` - at `\$.engines\[0\]`"),
        ({"engines": [{"name": "a", "url": "file:///etc"}]}, r"http.* at `\$.engines\[0\]`"),
        ({"engines": [{"name": "a", "url": "http://[::1"}]}, r"URL - at `\$.engines\[0\]`"),
        ({"engines": [{"name": "a", "url": "http://h", "api_key": 1}]}, r"`\$.*\.api_key`"),
    ],
)
def test_a_wrong_list_is_one_line_that_names_the_place(
    tmp_path: Path, document: object, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_upstreams(write(tmp_path / "f", document))
    assert str(caught.value).startswith(str(tmp_path / "f"))
    assert "\n" not in str(caught.value)


async def test_a_broken_or_missing_file_keeps_the_last_good_list(tmp_path: Path) -> None:
    path, lists = tmp_path / "f", list[Upstreams]()
    file = FollowedFile(path, read_upstreams, lists.append)
    await file.refresh()
    write(path, {"engines": [{"name": "one", "url": "http://h:1"}]})
    await file.refresh()
    await file.refresh()
    write(path, "{")
    await file.refresh()
    path.unlink()
    await file.refresh()
    write(path, {"engines": []})
    await file.refresh()
    assert lists == [Upstreams((ONE,)), Upstreams(())]


async def test_a_list_that_could_not_be_taken_over_is_taken_over_later(tmp_path: Path) -> None:
    path, lists, is_well = tmp_path / "f", list[Upstreams](), asyncio.Event()

    def take_over(upstreams: Upstreams) -> None:
        if not lists:
            lists.append(upstreams)
            raise RuntimeError("can't start new thread")
        lists.append(upstreams)
        is_well.set()

    write(path, {"engines": []})
    watching = asyncio.create_task(FollowedFile(path, read_upstreams, take_over).watch())
    await asyncio.wait_for(is_well.wait(), 30)
    watching.cancel()
    assert lists == [Upstreams(()), Upstreams(())]


@pytest.mark.parametrize(
    ("listen", "parsed"),
    [("127.0.0.1:8000", ("127.0.0.1", 8000)), ("[::1]:0", ("::1", 0)), ("a.b:1", ("a.b", 1))],
)
def test_listen_addresses_are_split(listen: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(listen) == parsed


@pytest.mark.parametrize("listen", ["8000", ":8000", "host:", "host:x", "host:70000", "host:-1"])
def test_wrong_listen_addresses_are_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        parse_listen(listen)


def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert [host for host in ("127.0.0.9", "::1", "localhost") if not is_loopback(host)] == []
    assert [host for host in ("0.0.0.0", "::", "10.0.0.1", "a.b") if is_loopback(host)] == []


def test_the_kernel_cuts_off_who_takes_no_byte_of_an_answer() -> None:
    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        with closing(socket.create_connection(listener.getsockname())):
            accepted, _ = listener.accept()
            with closing(accepted):
                limit_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == STALLED_READER_S * 1_000


async def test_a_drain_lets_a_call_end_whose_bytes_have_just_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchrun.server.gateway.http.CANCEL_S", 0.01)
    ended = []

    async def handle(request: web.BaseRequest) -> web.Response:
        assert isinstance(request.protocol, GatewayProtocol)
        with request.protocol.answering(request.content):
            await asyncio.sleep(0.2)
            ended.append(request.path)
            return web.Response()

    server = web.Server(handle, handler_cancellation=True)
    ours, callers = socket.socketpair()
    with closing(callers):
        loop = asyncio.get_running_loop()
        _, protocol = await loop.connect_accepted_socket(
            lambda: GatewayProtocol(server, head_s=60.0), ours
        )
        await asyncio.sleep(0)
        protocol.data_received(b"GET /last HTTP/1.1\r\nHost: a\r\n\r\n")
        server.pre_shutdown()
        await server.shutdown(60.0)
    assert ended == ["/last"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"detail": [{"loc": "x"}]}', '[{"loc": "x"}]'),
        (b"Invalid HTTP request received.", "Invalid HTTP request received."),
        (b"", "the server answered 400 Bad Request"),
        (b"{}", "the server answered 400 Bad Request"),
    ],
)
def test_any_error_body_becomes_an_envelope(body: bytes, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    assert json.loads(as_envelope(400, body)) == {"error": error}


def test_an_envelope_stays_byte_for_byte() -> None:
    error = b'{"message": "m", "type": "t", "param": null, "code": "c"}'
    body = b'{"error":  ' + error + b"}"
    assert as_envelope(400, body) == body


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"message": "m", "type": "BadRequestError", "param": "p", "code": 400}, ("m", "p")),
        ({"message": "m", "type": "BadRequestError", "code": None, "more": 1}, ("m", None)),
        (
            {"message": ["m"], "type": "BadRequestError"},
            ("the server answered 400 Bad Request", None),
        ),
    ],
)
def test_an_envelope_has_four_keys_with_text(
    error: dict[str, object], expected: tuple[str, str | None]
) -> None:
    message, param = expected
    whole = {"message": message, "type": "BadRequestError", "param": param, "code": None}
    assert json.loads(as_envelope(400, json.dumps({"error": error}).encode())) == {"error": whole}
