"""Only holders of one secret open a connection, and the secret is kept well."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agent_rig import write_certificate

from batchrun.errors import ConfigError
from batchrun.mutual_tls import (
    client_context,
    derive_token,
    read_or_make_secret,
    read_secret,
    server_context,
    show,
)

SECRET = b"the secret of this one agent here"
OTHER = b"another secret, of the same length"


@asynccontextmanager
async def echo(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that sends back what it gets; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def say(port: int, context: ssl.SSLContext) -> bytes:
    """What comes back; nothing where the server does not let us in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"hello")
        return await reader.read()
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        writer.close()


async def test_holders_of_the_secret_talk_by_tls_1_3() -> None:
    async with echo(server_context(SECRET)) as port:
        assert await say(port, client_context(SECRET)) == b"hello"
    assert server_context(SECRET).minimum_version is ssl.TLSVersion.TLSv1_3


async def test_a_caller_believes_no_server_with_another_secret() -> None:
    async with echo(server_context(OTHER)) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await say(port, client_context(SECRET))


async def test_a_server_lets_no_caller_in_without_its_secret() -> None:
    anyone = client_context(OTHER)
    anyone.verify_mode = ssl.CERT_NONE
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    nobody.verify_mode = ssl.CERT_NONE
    async with echo(server_context(SECRET)) as port:
        assert [await say(port, each) for each in (anyone, nobody)] == [b"", b""]


@pytest.mark.parametrize("is_rsa", [False, True])
async def test_a_given_certificate_is_shown_and_believed_under_its_name(
    tmp_path: Path, *, is_rsa: bool
) -> None:
    context = server_context(SECRET, *write_certificate(tmp_path, "127.0.0.1", is_rsa=not is_rsa))
    certificate, key = write_certificate(tmp_path, "127.0.0.1", is_rsa=is_rsa)
    async with echo(context) as port:
        show(context, certificate, key)
        assert await say(port, client_context(SECRET, certificate)) == b"hello"
        assert await say(port, client_context(OTHER, certificate)) == b""
        with pytest.raises(ssl.SSLCertVerificationError):
            await say(port, client_context(SECRET))


def test_a_secret_is_made_for_its_owner_alone_and_then_kept(tmp_path: Path) -> None:
    path = tmp_path / "agents" / "secret"

    made = read_or_make_secret(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(made) == 64
    assert read_or_make_secret(path) == made
    assert read_or_make_secret(tmp_path / "other") != made


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("short", 0o600, "a secret has 32 to 4096 characters"),
        ("s" * 5_000, 0o600, "a secret has 32 to 4096 characters"),
        (SECRET.decode(), 0o644, "every user can read this secret"),
    ],
)
def test_a_poor_secret_is_refused(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)

    with pytest.raises(ConfigError, match=problem):
        read_secret(path)


def test_a_missing_secret_or_certificate_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the secret: No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(ConfigError, match="not a certificate in PEM"):
        client_context(SECRET, tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="cannot be used with the key"):
        server_context(SECRET, tmp_path / "none.pem", tmp_path / "none.key")


def test_tokens_for_other_purposes_follow_from_the_secret_and_tell_nothing_of_each_other() -> None:
    assert derive_token(SECRET, "hints") == derive_token(SECRET, "hints")
    assert len({derive_token(s, p) for s in (SECRET, OTHER) for p in ("hints", "other")}) == 4
