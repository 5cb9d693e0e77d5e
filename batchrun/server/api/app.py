"""The daemon's routes, all thin: OpenAI's API for the gateway, control routes for the command line.

The text of an API key never comes here, only its hash.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Engine, Slot
from batchrun.daemon.fleets import Fleets
from batchrun.engine.command import has_tool_parser
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import EngineError
from batchrun.home import CONTROL_PREFIX, GATEWAY_HEADER, Home
from batchrun.jobs.results.file_bytes import FileBytes
from batchrun.jobs.spec import MAX_SPEC_CHARS, Weight
from batchrun.routing.decisions import NUM_KEPT
from batchrun.server.api.batches import Batches, batches_router
from batchrun.server.api.errors import Callers, install_error_handlers
from batchrun.server.api.files import Files, files_router
from batchrun.server.api.key_list import KeyList
from batchrun.server.api.metrics import MetricsPage, read_key_storage
from batchrun.server.api.picture import JsonObject, Status
from batchrun.server.api.rolling import Rolling
from batchrun.server.api.upload import Traffic
from batchrun.store.api_keys import MAX_COUNT, MAX_TOKENS, KeyLimits, NewApiKey, Role
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import DEFAULT_MODEL


class _Strict(BaseModel):
    """What the command line sends; other keys are refused."""

    model_config = ConfigDict(extra="forbid")


class _Limits(_Strict):
    """See `KeyLimits`."""

    requests_per_minute: Annotated[int | None, Field(gt=0, le=MAX_COUNT)] = None
    enqueued_tokens: Annotated[int | None, Field(gt=0, le=MAX_TOKENS)] = None
    concurrent_batches: Annotated[int | None, Field(gt=0, le=MAX_COUNT)] = None
    stored_bytes: Annotated[int | None, Field(gt=0, le=MAX_TOKENS)] = None
    concurrent_calls: Annotated[int | None, Field(gt=0, le=MAX_COUNT)] = None
    max_weight: Weight | None = None
    min_deadline_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None


class KeyChange(_Limits):
    """Other limits of a key, or another class; those left out stay, null is that of all keys."""

    slo_class: str | None = None


class KeySubmission(_Strict):
    """See `NewApiKey`."""

    id: Annotated[str, Field(pattern=r"^key_[0-9a-z]{12}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    role: Role
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    slo_class: str | None
    limits: _Limits


class NewWork(_Strict):
    """What a job would compute, of which model, and its share among others."""

    computed_tokens: Annotated[int, Field(ge=0, le=1 << 60)]
    weight: Weight = 1.0
    model: str = DEFAULT_MODEL


class CallsWanted(_Strict):
    """The number from which calls are wanted, by engine; 0 for engines left out."""

    numbers: dict[str, Annotated[int, Field(ge=0)]] = {}


class Submission(_Strict):
    """A checked and pinned job. `spec` and `pin` are JSON texts."""

    id: Annotated[str, Field(pattern=r"^job_[0-9a-z]{10}$")]
    name: str
    spec: Annotated[str, Field(max_length=MAX_SPEC_CHARS)]
    pin: Annotated[str, Field(max_length=64 << 20)]
    content_hash: str
    num_rows: Annotated[int, Field(gt=0)]
    deadline_s: Annotated[float | None, Field(gt=0)] = None


class EngineChange(_Strict):
    """A policy, a token budget and an order of calls for all engines; null: as they were started,
    left out: as now."""

    policy: Annotated[str | None, Field(max_length=64)] = None
    token_budget: Annotated[int | None, Field(gt=0)] = None
    online_queue: Annotated[str | None, Field(max_length=64)] = None


class RestartWanted(_Strict):
    """For how long calls may go on in an engine that is to be restarted."""

    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FleetWanted(_Strict):
    """How many replicas a fleet shall have, and for how long calls may go on in those too many."""

    fleet: str
    replicas: int
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OfflineSetting(_Strict):
    """Whether offline work runs at all."""

    on: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """What the routes need besides the daemon.

    `token` opens the control routes, `gateway_key` those of OpenAI's API and no other. `files` is
    where bytes lie; `windows` are the completion windows that batches may have, `keys` those that
    are changed here. `rolling` restarts engines. `traffic` are the files on their way.
    """

    home: Home
    files: FileBytes
    token: str
    gateway_key: str
    windows: Sequence[str]
    rolling: Rolling
    keys: KeyList
    traffic: Traffic = field(default_factory=Traffic)


def make_app(daemon: Daemon, status: Status, edge: Edge) -> FastAPI:
    """The daemon's routes; all but `/healthz` need one of the two secrets."""
    app = FastAPI(
        title="batchrun", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    page = MetricsPage(daemon, status.watch, status.restarts, status.fleets)
    made_files = Files(daemon.store, edge.files, edge.traffic)

    @app.get("/healthz")
    async def healthz() -> dict[str, object]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        given = request.headers.get(GATEWAY_HEADER, "")
        if not hmac.compare_digest(given.encode(), edge.gateway_key.encode()):
            raise HTTPException(401, "ask the gateway, not the daemon")
        read = partial(read_key_storage, daemon.store, edge.keys.defaults, edge.traffic)
        keys = await asyncio.to_thread(read)
        return Response(page.render(keys), media_type=CONTENT_TYPE_LATEST)

    app.include_router(_control_router(daemon, status, edge))
    guards = [Depends(Callers(daemon.store, edge.gateway_key, edge.keys.defaults).check)]
    app.include_router(files_router(made_files, guards))
    batches = Batches(daemon, edge.home.results, edge.windows)
    app.include_router(batches_router(batches, guards))
    return app


def _control_router(daemon: Daemon, status: Status, edge: Edge) -> APIRouter:
    """What the CLI asks of a running daemon."""

    def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), edge.token.encode()):
            raise HTTPException(401, "wrong or missing token")

    control = APIRouter(prefix=CONTROL_PREFIX, dependencies=[Depends(check_token)])
    _add_jobs(control, daemon, status)
    _add_engines(control, daemon)
    _add_restart(control, edge.rolling)
    _add_fleets(control, daemon, status.fleets)
    _add_models(control, daemon)
    _add_routing(control, status)
    _add_keys(control, edge.keys)
    return control


def _add_jobs(control: APIRouter, daemon: Daemon, status: Status) -> None:
    @control.get("/status")
    async def get_status(job: str | None = None) -> dict[str, object]:
        return await status.snapshot(job)

    @control.post("/jobs")
    async def submit(submission: Submission) -> dict[str, object]:
        record = await daemon.submit(NewJob(**submission.model_dump()))
        return {"id": record.id}

    @control.get("/jobs/{job_id}")
    async def get_job(job_id: str) -> dict[str, object]:
        return await status.job(job_id)

    @control.post("/jobs/{job_id}/{action}")
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

    @control.post("/foretell")
    async def predict(work: NewWork) -> dict[str, object]:
        assigner, waiting = daemon.dispatcher.assigner, daemon.dispatcher.waiting
        turns, (pool, slots) = assigner.turns, assigner.pool_of(work.model)
        tokens_per_s, seen_s = turns.pace(pool)
        completion = turns.predict(work.weight, work.computed_tokens, waiting, pool)
        return {
            "eta": None if completion is None else completion._asdict(),
            "computed_tokens_per_s": tokens_per_s,
            "seen_s": seen_s,
            "num_running_jobs": len(daemon.dispatcher.jobs),
            "num_engines": max(1, sum(slot.is_usable for slot in slots)),
        }


def _add_engines(control: APIRouter, daemon: Daemon) -> None:
    @control.post("/offline")
    async def switch_offline(switch: OfflineSetting) -> dict[str, object]:
        await daemon.switch_offline(on=switch.on)
        return {"on": switch.on}

    @control.post("/engines")
    async def change_engines(change: EngineChange) -> dict[str, object]:
        given, now = change.model_fields_set, daemon.steering
        answers = await now.change(
            change.policy if "policy" in given else now.policy,
            change.token_budget if "token_budget" in given else now.token_budget,
            change.online_queue if "online_queue" in given else now.online_queue,
        )
        return {"engines": to_builtins(answers)}

    @control.post("/calls")
    async def collect_calls(wanted: CallsWanted) -> dict[str, object]:
        """To ask is to record: engines stop some seconds after the last question."""
        steering = daemon.steering
        recordings = await steering.collect_calls(wanted.numbers)
        names = (slot.engine.name for slot in daemon.slots)
        return {
            "engines": to_builtins(recordings),
            "unrecorded": [name for name in names if name not in steering.links],
        }


def _add_restart(control: APIRouter, rolling: Rolling) -> None:
    @control.post("/restart")
    async def restart(wanted: RestartWanted) -> JsonObject:
        await rolling.begin(wanted.drain_s)
        return {}

    @control.get("/restart")
    async def how_far() -> JsonObject:
        return {"told": rolling.told, "is_over": rolling.is_over, "failure": rolling.failure}


def _add_fleets(control: APIRouter, daemon: Daemon, fleets: Fleets) -> None:
    @control.post("/fleets")
    async def resize(wanted: FleetWanted) -> JsonObject:
        await fleets.scale(wanted.fleet, wanted.replicas, daemon.slots, wanted.drain_s)
        return {"fleets": fleets.view()}


def _add_models(control: APIRouter, daemon: Daemon) -> None:
    @control.get("/served")
    async def served(model: str) -> dict[str, object]:
        """What the engines that serve a model can take; null: not known."""
        daemon.check_model(model)
        slots = [slot for slot in daemon.slots if slot.is_usable and slot.models is not None]
        return {
            "engines": [
                {
                    "name": slot.engine.name,
                    "context_tokens": _context_of(slot, model),
                    "takes_tools": _takes_tools(slot.engine),
                }
                for slot in slots
                if slot.serves(model)
            ]
        }


def _context_of(slot: Slot, model: str) -> int | None:
    name = slot.default_model if model == DEFAULT_MODEL else model
    return slot.engine.client.context_tokens.get(name or "")


def _takes_tools(engine: Engine) -> bool | None:
    """Whether vLLM parses calls of tools; None where its arguments are not ours."""
    if not isinstance(engine, ManagedEngine) or engine.settings.command is not None:
        return None
    return has_tool_parser(engine.settings.vllm_args)


def _add_routing(control: APIRouter, status: Status) -> None:
    @control.get("/routing")
    async def explain(most: Annotated[int, Query(ge=0, le=NUM_KEPT)] = NUM_KEPT) -> JsonObject:
        return _told(await status.figures.explain(most))

    @control.get("/routed-calls")
    async def routed_calls(since: Annotated[float, Query(allow_inf_nan=False)]) -> JsonObject:
        return _told(await status.figures.ended_calls(since))


def _told(answer: JsonObject | None) -> JsonObject:
    if answer is None:
        raise EngineError("the gateway does not answer; `batchrun logs gateway` says why")
    return answer


def _add_keys(control: APIRouter, keys: KeyList) -> None:
    @control.post("/keys")
    async def create(given: KeySubmission) -> dict[str, object]:
        values = given.model_dump()
        limits = KeyLimits(**values.pop("limits"))
        added = await asyncio.to_thread(keys.add, NewApiKey(**values, limits=limits))
        return {"id": added.id}

    @control.post("/keys/{key}/set")
    async def change(key: str, given: KeyChange) -> dict[str, object]:
        values = given.model_dump(exclude_unset=True)
        changed = await asyncio.to_thread(keys.change, key, values)
        return {"id": changed.id, "name": changed.name}

    @control.post("/keys/{key}/revoke")
    async def revoke(key: str) -> dict[str, object]:
        revoked = await asyncio.to_thread(keys.revoke, key)
        return {"id": revoked.id, "name": revoked.name}
