"""The door of the web page: login by API key, sessions in a cookie, and what passes to the daemon.

    GET  /dashboard/login      the form           (no key needed, as are the files below static/)
    POST /dashboard/login      key=sk-br-...      -> cookie, /dashboard
    POST /dashboard/logout                        -> no cookie, /dashboard/login
    *    /dashboard...         passed to the daemon, with the id of the caller's key

A session is `KEY_ID.EXPIRES_AT.MAC`. The MAC is keyed with a secret of this gateway and the hash of
the API key, so that a session ends with its key, and neither the secret nor the hash makes one.
Where no key is asked for, the page and the API answer on addresses and on names of this machine
alone: another site that leads its name here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from aiohttp import web

from batchrun.errors import DaemonUnavailableError, shortened
from batchrun.files import locked_bytes, sync_folder
from batchrun.server.gateway.admission import ABOUT_CALLER, AboutCaller, ApiKey, KeyRing
from batchrun.server.gateway.bodies import read_body
from batchrun.server.gateway.envelope import REQUEST_ID, RefusalError

PREFIX = "/dashboard"
LOGIN, LOGOUT, STATIC = f"{PREFIX}/login", f"{PREFIX}/logout", f"{PREFIX}/static/"
COOKIE = "batchrun_session"
SESSION_S = 12 * 3600
SECRET_BYTES = 32
MAX_FORM_BYTES = 4_096
BODY_IDLE_S = 10.0
STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
SAFE_METHODS = frozenset({"GET", "HEAD"})
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""No script or style but our files, no other site, no frame. Under `no-referrer` browsers would
send our own forms with `Origin: null`."""
WRONG_KEY = '<p role="alert">This is no API key of this deployment.</p>'
AWAY_REFRESH_S = 3


def is_dashboard(raw_path: str) -> bool:
    """Whether a path belongs to the page."""
    return raw_path == PREFIX or raw_path.startswith(f"{PREFIX}/")


class Sessions:
    """Makes and checks sessions; `secret` is common to the workers of a gateway."""

    def __init__(self, keys: KeyRing, secret: bytes) -> None:
        self._keys = keys
        self._secret = secret

    def begin(self, key: ApiKey, *, now_s: float) -> str:
        """A session of this key; `now_s` in UTC epoch seconds."""
        said = f"{key.id}.{int(now_s) + SESSION_S}"
        return f"{said}.{self._mac(key, said)}"

    def find(self, text: str, *, now_s: float) -> ApiKey | None:
        """The key of a session that holds; None for any other text."""
        said, _, mac = text.rpartition(".")
        key_id, _, expires_at = said.partition(".")
        key = self._keys.find(key_id)
        if not text.isascii():
            return None
        expected = "0" * 64 if key is None else self._mac(key, said)
        is_right = hmac.compare_digest(expected.encode(), mac.encode())
        is_alive = expires_at.isascii() and expires_at.isdigit() and int(expires_at[:12]) > now_s
        return key if is_right and is_alive else None

    def _mac(self, key: ApiKey, said: str) -> str:
        text = f"batchrun dashboard {said}".encode()
        return hmac.new(self._secret + key.sha256.encode(), text, hashlib.sha256).hexdigest()


def read_or_make_secret(path: Path) -> bytes:
    """32 bytes that only the owner can read; workers that start together find the same ones.

    What lost power may leave, fewer bytes or zeros, is replaced. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as file, locked_bytes(fd):
        secret = file.read()
        if len(secret) != SECRET_BYTES or not any(secret):
            secret = secrets.token_bytes(SECRET_BYTES)
            file.seek(0)
            file.truncate()
            file.write(secret)
            file.flush()
            os.fsync(fd)
            sync_folder(path.parent)
    return secret


@dataclass(frozen=True, slots=True)
class DashboardDoor:
    """Answers everything below `PREFIX`; `pass_on` carries a call to the daemon, or raises
    DaemonUnavailableError."""

    keys: KeyRing
    pass_on: Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
    session_secret: bytes = field(repr=False)

    @property
    def sessions(self) -> Sessions:
        return Sessions(self.keys, self.session_secret)

    async def answer(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """Raises RefusalError."""
        request[ABOUT_CALLER] = AboutCaller()
        _check_origin(request)
        if not self.keys.is_asked_for:
            _check_host(request)
        response = await self._answer(request, request_id)
        if not response.prepared:
            for name, value in PAGE_HEADERS.items():
                response.headers.setdefault(name, value)
            response.headers[REQUEST_ID] = request_id
        return response

    async def _answer(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if path.startswith(STATIC):
            return _static_file(path.removeprefix(STATIC))
        if path == LOGIN:
            return await self._log_in(request)
        if path == LOGOUT and request.method == "POST":
            response = _redirect(LOGIN)
            response.del_cookie(COOKIE, path=PREFIX)
            return response
        if self.keys.is_asked_for:
            key = self._caller(request)
            if key is None:
                return _ask_for_key(request)
            request[ABOUT_CALLER] = AboutCaller(key, PAGE_HEADERS)
        else:
            request[ABOUT_CALLER] = AboutCaller(None, PAGE_HEADERS)
        try:
            return await self.pass_on(request, request_id)
        except DaemonUnavailableError as error:
            return _away(request, str(error))

    def _caller(self, request: web.BaseRequest) -> ApiKey | None:
        session = request.cookies.get(COOKIE)
        if session is not None:
            return self.sessions.find(session, now_s=time.time())
        given = request.headers.get("Authorization")
        return None if given is None else self.keys.admit(given, PREFIX)

    async def _log_in(self, request: web.BaseRequest) -> web.Response:
        if request.method in SAFE_METHODS:
            return _page("login.html") if self.keys.is_asked_for else _redirect(PREFIX)
        if request.method != "POST":
            raise RefusalError(405, f"{request.method} is not allowed on {LOGIN}; use POST")
        body = await read_body(request, max_bytes=MAX_FORM_BYTES, idle_s=BODY_IDLE_S)
        given = parse_qs((body or b"").decode("utf-8", "replace")).get("key", [""])[0].strip()
        try:
            key = self.keys.admit(f"Bearer {given}", PREFIX)
        except RefusalError:
            return _page("login.html", status=401, alert=WRONG_KEY)
        response = _redirect(PREFIX)
        if key is not None:
            response.set_cookie(
                COOKIE,
                self.sessions.begin(key, now_s=time.time()),
                max_age=SESSION_S,
                path=PREFIX,
                httponly=True,
                samesite="Strict",
                secure=request.headers.get("X-Forwarded-Proto", "") == "https",
            )
        return response


def _parts(url: str) -> SplitResult:
    """Those of a URL; of what is none, those of nothing."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def check_site(request: web.BaseRequest) -> None:
    """For calls that show no key: whether no other site's page sent this. Raises RefusalError with
    403."""
    _check_host(request)
    _check_origin(request)


def _check_host(request: web.BaseRequest) -> None:
    """Whether the call came by a name or an address of this machine, or names none at all. Raises
    RefusalError with 403."""
    host = request.headers.get("Host")
    if host is None or _is_own(host):
        return
    raise RefusalError(
        403,
        "without API keys batchrun answers on addresses and this machine's own names, not on "
        f"'{shortened(_parts(f'//{host}').hostname or '')}'; make a key with `batchrun keys create "
        "NAME --role admin`",
    )


@lru_cache(maxsize=64)
def _is_own(host: str) -> bool:
    """Nobody can lead an address elsewhere, nor these names."""
    name = (_parts(f"//{host}").hostname or "").removesuffix(".")
    if name in {*LOCAL_NAMES, socket.gethostname().lower()} or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _check_origin(request: web.BaseRequest) -> None:
    """What changes something comes from our own page."""
    if request.method in SAFE_METHODS:
        return
    origin = request.headers.get("Origin")
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    is_ours = origin is None or _parts(origin).netloc == request.headers.get("Host", "")
    if not is_ours or site not in {"same-origin", "none"}:
        message = "this came from another site's page; a proxy in front must keep `Host`"
        raise RefusalError(403, message)


def _ask_for_key(request: web.BaseRequest) -> web.Response:
    """A person gets the form; what a page fetches in the background is refused, and the page
    leaves for the form then."""
    is_page = request.method in SAFE_METHODS and "HX-Request" not in request.headers
    if is_page and "text/event-stream" not in request.headers.get("Accept", ""):
        return _redirect(LOGIN)
    return web.Response(status=401, text="log in first", headers={"HX-Redirect": LOGIN})


def _away(request: web.BaseRequest, reason: str) -> web.Response:
    if request.method not in SAFE_METHODS or "HX-Request" in request.headers:
        return web.Response(status=503, text=reason)
    return _page("away.html", status=503, headers={"Refresh": str(AWAY_REFRESH_S)})


def _redirect(to: str) -> web.Response:
    return web.Response(status=303, headers={"Location": to})


def _page(
    name: str, *, status: int = 200, alert: str = "", headers: dict[str, str] | None = None
) -> web.Response:
    """A page that says nothing of the deployment; `alert` is HTML of ours."""
    text = _read(f"templates/{name}").decode().replace("<!-- alert -->", alert)
    return web.Response(status=status, text=text, content_type="text/html", headers=headers)


def _static_file(name: str) -> web.Response:
    kind = STATIC_TYPES.get(Path(name).suffix)
    if kind is None or "/" in name or name not in _static_names():
        raise RefusalError(404, f"the page has no file '{name}'")
    headers = {"Cache-Control": "public, max-age=3600"}
    body = _read(f"static/{name}")
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


@cache
def _static_names() -> frozenset[str]:
    folder = files("batchrun.server.web") / "static"
    return frozenset(each.name for each in folder.iterdir())


@cache
def _read(name: str) -> bytes:
    return (files("batchrun.server.web") / name).read_bytes()
