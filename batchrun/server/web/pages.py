"""The page's routes, below `/dashboard`: views, the stream that keeps them current, and actions.

The gateway says who calls (see `gateway/dashboard.py`). An action needs the token that stands in
the page: another site can send a form here, but cannot read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import cache, partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException

from batchrun import __version__
from batchrun.errors import BatchrunError, StoreUnreachableError, UnknownJobError
from batchrun.server.api.errors import ApiError, Caller, Callers, caller_of, for_strangers
from batchrun.server.api.upload import Download, Transfers
from batchrun.server.web.history import keep_history
from batchrun.server.web.sight import VIEWS, Facts, Sight
from batchrun.server.web.uploads import Desk, UploadDraft
from batchrun.store.jobs import JobRecord

PREFIX = "/dashboard"
TOKEN_HEADER = "X-Dashboard-Token"
UPDATE_S = 1.0
QUIET_S = 15.0
MAX_STREAM_S = 3600.0
"""Then the page connects again, and its session is asked for."""
RECONNECT_MS = 1000
MAX_UNCHECKED_S = 60.0
"""So long a page stays connected while the store that knows its caller is away."""
MAX_STREAMS = 64
MAX_STREAMS_OF_USERS = 48
"""Together; the rest is for who runs the deployment."""
MAX_STREAMS_OF_A_KEY = 16
JOB = "job"
STILL_VIEWS = frozenset({"submit"})
"""What a person fills in is not replaced."""

Part = tuple[str, Facts]
"""A template, and what it needs; equal ones look the same."""


class Tokens:
    """What actions must show: a token for each caller, until the daemon ends."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def of(self, caller: Caller) -> str:
        """What an action of this caller must show."""
        text = f"dashboard {caller.owner or ''}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def render(name: str, facts: Facts) -> str:
    """The text of a template; what callers and engines said stays text in it."""
    return _templates().get_template(name).render(facts)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("batchrun.server.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    made.globals |= {"views": VIEWS, "prefix": PREFIX, "version": __version__}
    return made


class Pages:
    """Renders the views for one caller at a time. `downloads` bounds outputs on their way; `close`
    ends all streams."""

    def __init__(self, sight: Sight, desk: Desk, downloads: Transfers) -> None:
        self.desk = desk
        self.downloads = downloads
        self._sight = sight
        self._tokens = Tokens()
        self._closing = asyncio.Event()
        self._streams = Counter[tuple[str | None, bool]]()

    async def watch(self) -> None:
        """Take the samples of the charts, until cancelled; uploads under way end with it."""
        try:
            sight = self._sight
            await keep_history(sight.daemon, sight.history, sight.figures, sight.see_starts)
        finally:
            await self.desk.close()

    def close(self) -> None:
        """End the streams, or they would hold up the end of the daemon."""
        self._closing.set()

    async def page(self, view: str, caller: Caller, job_id: str | None = None) -> HTMLResponse:
        """A whole page."""
        _check_view(view, caller, job_id)
        status = 200
        if job_id is not None:
            try:
                await self._sight.find(caller, job_id)
            except UnknownJobError:
                status = 404
        parts = await self._parts(view, caller, job_id)
        title = job_id if view == JOB else VIEWS[view].title
        facts: Facts = {
            "view": view,
            "title": title,
            "job_id": job_id,
            "header": render(*parts["header"]),
            "content": render(*parts["view"]),
            "is_admin": caller.is_admin,
            "has_key": caller.owner is not None,
            "is_still": view in STILL_VIEWS,
        }
        return HTMLResponse(render("layout.html", facts), status_code=status)

    def stream(
        self, view: str, caller: Caller, job_id: str | None, check: Callable[[], Awaitable[None]]
    ) -> StreamingResponse:
        """The parts of a page as they change, as server-sent events. `check`, called before each
        update, raises HTTPException or ApiError once the caller may see them no more; what it
        raises ends the stream, StoreUnreachableError only after `MAX_UNCHECKED_S`."""
        _check_view(view, caller, job_id)
        self._check_streams(caller)
        events = self._events(view, caller, job_id, check)
        return StreamingResponse(events, media_type="text/event-stream")

    def _check_streams(self, caller: Caller) -> None:
        bounds = [(self._streams.total(), MAX_STREAMS, "")]
        if not caller.is_admin:
            num_of_users = sum(num for (_, is_admin), num in self._streams.items() if not is_admin)
            bounds += [
                (num_of_users, MAX_STREAMS_OF_USERS, " with user keys"),
                (self._streams[caller.owner, False], MAX_STREAMS_OF_A_KEY, " with this key"),
            ]
        for num, most, whose in bounds:
            if num >= most:
                raise HTTPException(503, f"{most} pages are open{whose}; close one")

    async def _events(
        self, view: str, caller: Caller, job_id: str | None, check: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[str]:
        self._streams[caller.owner, caller.is_admin] += 1
        sent: dict[str, Part] = {}
        began_s = quiet_since_s = checked_s = time.monotonic()
        try:
            yield f"retry: {RECONNECT_MS}\n\n"
            while not self._closing.is_set() and time.monotonic() - began_s < MAX_STREAM_S:
                checked_s = await _check_again(check, checked_s)
                for name, part in (await self._parts(view, caller, job_id)).items():
                    if sent.get(name) != part and (name == "header" or view not in STILL_VIEWS):
                        sent[name] = part
                        quiet_since_s = time.monotonic()
                        yield _event(name, render(*part))
                if time.monotonic() - quiet_since_s > QUIET_S:
                    quiet_since_s = time.monotonic()
                    yield ": nothing new\n\n"
                await self._pause()
        except (HTTPException, ApiError, BatchrunError):
            return
        finally:
            self._streams[caller.owner, caller.is_admin] -= 1
            self._streams += Counter()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(UPDATE_S):
                await self._closing.wait()
        except TimeoutError:
            return

    async def _parts(self, view: str, caller: Caller, job_id: str | None) -> dict[str, Part]:
        """The template of each part of a page, and what it needs."""
        head = await self._sight.header(caller) | {"token": self._tokens.of(caller)}
        content: Part
        try:
            content = (f"{view}.html", await self._sight.see(view, caller, job_id))
        except BatchrunError as error:
            content = ("notice.html", {"message": _said_to(caller, error), "is_error": True})
        return {"header": ("header.html", head), "view": content}

    def check_token(self, request: Request, caller: Caller) -> None:
        """Raises HTTPException."""
        given = request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self._tokens.of(caller).encode()):
            raise HTTPException(403, "this page is from before the daemon started; load it again")

    async def act(self, caller: Caller, action: Callable[[], Awaitable[str]]) -> HTMLResponse:
        """What came of an action, in a line; a refusal of batchrun's is one, too."""
        try:
            message, status = await action(), 200
        except BatchrunError as error:
            message, status = _said_to(caller, error), error.http_status
        text = render("notice.html", {"message": message, "is_error": status != 200})
        return HTMLResponse(text, status_code=status)


async def _check_again(check: Callable[[], Awaitable[None]], checked_s: float) -> float:
    """The instant of the last check that found the caller let in; `checked_s` is that so far."""
    try:
        await check()
    except StoreUnreachableError:
        if time.monotonic() - checked_s > MAX_UNCHECKED_S:
            raise
        return checked_s
    return time.monotonic()


def _said_to(caller: Caller, error: BatchrunError) -> str:
    return str(error) if caller.is_admin else for_strangers(error)


def _check_view(view: str, caller: Caller, job_id: str | None) -> None:
    if view not in VIEWS and (view != JOB or job_id is None):
        raise HTTPException(404, f"no such view: {view}")
    if view != JOB and not VIEWS[view].is_for_all:
        _check_admin(caller)


def _check_admin(caller: Caller) -> None:
    if not caller.is_admin:
        raise HTTPException(403, "This needs an API key of the role 'admin'.")


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines() if line.strip())
    return f"event: {name}\n{lines or 'data:'}\n"


def dashboard_router(pages: Pages, sight: Sight, callers: Callers) -> APIRouter:
    """All routes of the page; each call must come through the gateway."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(callers.check)])
    _add_uploads(router, pages)
    _add_output(router, pages, sight)
    _add_views(router, pages, callers)
    _add_actions(router, pages, sight)
    return router


def _add_views(router: APIRouter, pages: Pages, callers: Callers) -> None:
    @router.get("")
    async def home(request: Request) -> Response:
        return await pages.page("jobs", caller_of(request))

    @router.get("/events/{view}")
    async def events(request: Request, view: str, job: str | None = None) -> Response:
        async def check() -> None:
            await callers.check(request)
            _check_view(view, caller_of(request), job)

        return pages.stream(view, caller_of(request), job, check)

    @router.get("/jobs/{job_id}")
    async def job(request: Request, job_id: str) -> Response:
        return await pages.page(JOB, caller_of(request), job_id)

    @router.get("/{view}")
    async def view(request: Request, view: str) -> Response:
        return await pages.page(view, caller_of(request))


def _add_uploads(router: APIRouter, pages: Pages) -> None:
    desk = pages.desk

    def shown(draft: UploadDraft) -> HTMLResponse:
        reply = HTMLResponse(render("draft.html", {"draft": draft}))
        if draft.job_id is not None:
            reply.headers["HX-Redirect"] = f"{PREFIX}/jobs/{draft.job_id}"
        return reply

    def check(request: Request) -> None:
        caller = caller_of(request)
        pages.check_token(request, caller)
        _check_admin(caller)

    @router.post("/uploads")
    async def upload(request: Request) -> Response:
        check(request)
        return shown(await desk.receive(request))

    @router.get("/uploads/{draft_id}")
    async def look(request: Request, draft_id: str) -> Response:
        _check_admin(caller_of(request))
        return shown(desk.find(draft_id))

    @router.post("/uploads/{draft_id}/{action}")
    async def change(request: Request, draft_id: str, action: str) -> Response:
        check(request)
        if action == "start":
            return shown(desk.start(draft_id))
        if action != "discard":
            raise UnknownJobError(f"no such action: {action}")
        desk.discard(draft_id)
        return HTMLResponse("")


def _add_output(router: APIRouter, pages: Pages, sight: Sight) -> None:
    @router.get("/jobs/{job_id}/output")
    async def output(request: Request, job_id: str) -> Response:
        caller = caller_of(request)
        _check_admin(caller)
        record = await sight.find(caller, job_id)
        path = await sight.output(record)
        if path is None:
            raise UnknownJobError(f"{job_id}: there is no output file on this machine")
        reply = FileResponse(path, media_type="application/octet-stream", filename=path.name)
        return Download(reply, pages.downloads, caller.owner)


def _add_actions(router: APIRouter, pages: Pages, sight: Sight) -> None:
    daemon = sight.daemon

    @router.post("/offline")
    async def switch(request: Request, on: Annotated[str, Form()]) -> Response:
        caller = caller_of(request)
        pages.check_token(request, caller)
        _check_admin(caller)

        async def switched() -> str:
            await daemon.switch_offline(on=on == "on")
            return f"Offline work is {'on' if on == 'on' else 'off'}."

        return await pages.act(caller, switched)

    @router.post("/jobs/{job_id}/{action}")
    async def change(request: Request, job_id: str, action: str) -> Response:
        caller = caller_of(request)
        pages.check_token(request, caller)
        commands: dict[str, Callable[[str], Awaitable[JobRecord]]] = {
            "pause": daemon.pause,
            "resume": daemon.resume,
            "cancel": daemon.cancel,
        }
        if action not in commands:
            raise UnknownJobError(f"no such action: {action}")
        if action != "cancel":
            _check_admin(caller)

        async def changed() -> str:
            record = await sight.find(caller, job_id)
            state = (await commands[action](record.id)).state
            return f"{record.id} is {state}."

        return await pages.act(caller, changed)


def _number(value: float | None, template: str = "{:,.0f}", unit: str = "") -> str:
    """A figure with its unit; a dash where nobody knows."""
    return "-" if value is None else template.format(value) + unit


def _size(num_bytes: float) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e3:,.0f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest_s:02} s" if minutes else f"{rest_s} s"


def _instant(at: float | None) -> str:
    """UTC, to the second, as far as calendars go: a job may have any time."""
    if at is None:
        return "-"
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "after the year 9999"


FILTERS: dict[str, Callable[..., Any]] = {
    "number": _number,
    "decimal": partial(_number, template="{:,.1f}"),
    "percent": partial(_number, template="{:.0%}"),
    "seconds": partial(_number, template="{:.3f}", unit=" s"),
    "ratio": partial(_number, template="{:.2f}", unit=" times"),
    "size": _size,
    "duration": _duration,
    "instant": _instant,
    "as_json": partial(json.dumps, separators=(",", ":")),
}
