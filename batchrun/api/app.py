"""The control routes: what the CLI asks of a running daemon. Thin: each is one call."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import Depends, FastAPI, Request, params
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from batchrun.api.metrics import MetricsPage
from batchrun.api.status import Status
from batchrun.daemon import Daemon
from batchrun.errors import BatchrunError
from batchrun.home import CONTROL_PREFIX as PREFIX
from batchrun.store import JobRecord, NewJob
from batchrun.wire import PolicyName


class Submission(BaseModel):
    """A checked and pinned job. `spec` and `pin` are JSON texts."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(pattern=r"^job_[0-9a-z]{10}$")]
    name: str
    spec: Annotated[str, Field(max_length=4 << 20)]
    pin: Annotated[str, Field(max_length=64 << 20)]
    content_hash: str
    num_rows: Annotated[int, Field(gt=0)]
    deadline_s: Annotated[float | None, Field(gt=0)] = None


class EngineChange(BaseModel):
    """A policy and a token budget for all engines; null: as they were started, left out: as now."""

    model_config = ConfigDict(extra="forbid")

    policy: PolicyName | None = None
    token_budget: Annotated[int | None, Field(gt=0)] = None


class OfflineSwitch(BaseModel):
    """Whether offline work runs at all."""

    model_config = ConfigDict(extra="forbid")

    on: bool


def make_app(daemon: Daemon, status: Status, token: str) -> FastAPI:
    """The daemon's routes; all but `/healthz` and `/metrics` need `token` as a bearer token."""

    def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "wrong or missing token")

    app = FastAPI(title="batchrun", docs_url=None, redoc_url=None, openapi_url=None)
    guarded = [Depends(check_token)]
    page = MetricsPage(daemon)
    _install_error_handlers(app)

    @app.get("/healthz")
    async def healthz() -> dict[str, object]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(page.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get(f"{PREFIX}/status", dependencies=guarded)
    async def get_status() -> dict[str, object]:
        return await status.snapshot()

    @app.post(f"{PREFIX}/jobs", dependencies=guarded)
    async def submit(submission: Submission) -> dict[str, object]:
        record = await daemon.submit(NewJob(**submission.model_dump()))
        return {"id": record.id}

    @app.get(PREFIX + "/jobs/{job_id}", dependencies=guarded)
    async def get_job(job_id: str) -> dict[str, object]:
        return await status.job(job_id)

    @app.post(PREFIX + "/jobs/{job_id}/{action}", dependencies=guarded)
    async def change_job(job_id: str, action: str) -> dict[str, object]:
        commands: dict[str, Callable[[str], Awaitable[JobRecord]]] = {
            "pause": daemon.pause,
            "resume": daemon.resume,
            "resume-accepting-input": partial(daemon.resume, accept_input=True),
            "cancel": daemon.cancel,
        }
        if action not in commands:
            raise HTTPException(404, f"no such action: {action}")
        record = await commands[action](job_id)
        return {"id": record.id, "state": str(record.state)}

    _install_switches(app, daemon, guarded)
    return app


def _install_switches(app: FastAPI, daemon: Daemon, guarded: Sequence[params.Depends]) -> None:
    """The routes that change how all engines work."""

    @app.post(f"{PREFIX}/offline", dependencies=guarded)
    async def switch_offline(switch: OfflineSwitch) -> dict[str, object]:
        await daemon.set_offline(on=switch.on)
        return {"on": switch.on}

    @app.post(f"{PREFIX}/engines", dependencies=guarded)
    async def change_engines(change: EngineChange) -> dict[str, object]:
        given, now = change.model_fields_set, daemon.steering
        answers = await now.change(
            change.policy if "policy" in given else now.policy,
            change.token_budget if "token_budget" in given else now.token_budget,
        )
        return {"engines": to_builtins(answers)}


def _install_error_handlers(app: FastAPI) -> None:
    """Every failure leaves in OpenAI's error envelope."""

    @app.exception_handler(BatchrunError)
    async def on_our_error(_request: Request, error: BatchrunError) -> JSONResponse:
        return _envelope(error.http_status, str(error), type(error).__name__)

    @app.exception_handler(HTTPException)
    async def on_http_error(_request: Request, error: HTTPException) -> JSONResponse:
        return _envelope(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def on_bad_request(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "body")
        return _envelope(400, f"{key}: {first['msg']}")


def _envelope(status_code: int, message: str, code: str | None = None) -> JSONResponse:
    kind = "server_error" if status_code >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status_code)
