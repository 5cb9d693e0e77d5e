"""The daemon's routes, all thin: OpenAI's API for the gateway, control routes for the command line,
and the picture of the deployment that `status` shows.

The text of an API key never comes here, only its hash.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Engine, Slot
from batchrun.daemon.view import view_engine, view_job
from batchrun.engine.command import has_tool_parser
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import EngineError, StoreLockedError, StoreUnreachableError
from batchrun.home import CONTROL_PREFIX, GATEWAY_HEADER, Home
from batchrun.jobs.results.file_bytes import FileBytes
from batchrun.jobs.spec import Weight
from batchrun.pool.pace import Completion
from batchrun.routing.decisions import NUM_KEPT
from batchrun.server.api.batches import Batches, batches_router
from batchrun.server.api.errors import Callers, install_error_handlers
from batchrun.server.api.files import Files, files_router
from batchrun.server.api.key_list import KeyList
from batchrun.server.api.metrics import MetricsPage, read_key_storage
from batchrun.server.api.watch import LoopWatch
from batchrun.store import jobs, results
from batchrun.store.api_keys import (
    MAX_COUNT,
    MAX_TOKENS,
    NO_LIMITS,
    KeyLimits,
    NewApiKey,
    Role,
)
from batchrun.store.jobs import Counts, JobRecord, NewJob
from batchrun.types import DEFAULT_MODEL, EnginePhase

HOUR_S = 3600.0


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
    """What a job would compute, and its share among others."""

    computed_tokens: Annotated[int, Field(ge=0, le=1 << 60)]
    weight: Weight = 1.0


class CallsWanted(_Strict):
    """The number from which calls are wanted, by engine; 0 for engines left out."""

    numbers: dict[str, Annotated[int, Field(ge=0)]] = {}


class Submission(_Strict):
    """A checked and pinned job. `spec` and `pin` are JSON texts."""

    id: Annotated[str, Field(pattern=r"^job_[0-9a-z]{10}$")]
    name: str
    spec: Annotated[str, Field(max_length=4 << 20)]
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


class OfflineSetting(_Strict):
    """Whether offline work runs at all."""

    on: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """What the routes need besides the daemon.

    `token` opens the control routes, `gateway_key` those of OpenAI's API and no other. `files` is
    where bytes lie; `windows` are the completion windows that batches may have, `key_limits` what
    user keys may that have no limit of their own.
    """

    home: Home
    files: FileBytes
    token: str
    gateway_key: str
    windows: Sequence[str]
    key_limits: KeyLimits = NO_LIMITS


def make_app(daemon: Daemon, status: Status, edge: Edge) -> FastAPI:
    """The daemon's routes; all but `/healthz` need one of the two secrets."""
    app = FastAPI(
        title="batchrun", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    page, made_files = MetricsPage(daemon, status.watch), Files(daemon.store, edge.files)
    transfers = made_files.uploads, made_files.downloads

    @app.get("/healthz")
    async def healthz() -> dict[str, object]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        given = request.headers.get(GATEWAY_HEADER, "")
        if not hmac.compare_digest(given.encode(), edge.gateway_key.encode()):
            raise HTTPException(401, "ask the gateway, not the daemon")
        keys = await asyncio.to_thread(read_key_storage, daemon.store, edge.key_limits, *transfers)
        return Response(page.render(keys), media_type=CONTENT_TYPE_LATEST)

    app.include_router(_control_router(daemon, status, edge))
    guards = [Depends(Callers(daemon.store, edge.gateway_key, edge.key_limits).check)]
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
    _add_models(control, daemon)
    _add_routing(control, status)
    _add_keys(control, KeyList(daemon.store, edge.home.api_keys, edge.key_limits))
    return control


def _add_jobs(control: APIRouter, daemon: Daemon, status: Status) -> None:
    @control.get("/status")
    async def get_status() -> dict[str, object]:
        return await status.snapshot()

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
        turns = daemon.dispatcher.assigner.turns
        tokens_per_s, seen_s = turns.pace
        completion = turns.predict(work.weight, work.computed_tokens)
        return {
            "eta": None if completion is None else completion._asdict(),
            "computed_tokens_per_s": tokens_per_s,
            "seen_s": seen_s,
            "num_running_jobs": len(daemon.dispatcher.jobs),
            "num_engines": len(daemon.slots),
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


def _add_models(control: APIRouter, daemon: Daemon) -> None:
    @control.get("/served")
    async def served(model: str) -> dict[str, object]:
        """What the engines that serve a model can take; null: not known."""
        daemon.dispatcher.check_model(model)
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
        told = await status.figures.explain(most)
        if told is None:
            raise EngineError("the gateway does not answer; `batchrun logs gateway` says why")
        return told

    @control.get("/routed-calls")
    async def routed_calls(since: Annotated[float, Query(allow_inf_nan=False)]) -> JsonObject:
        told = await status.figures.ended_calls(since)
        if told is None:
            raise EngineError("the gateway does not answer; `batchrun logs gateway` says why")
        return told


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


JsonObject = dict[str, Any]


class AsksGateway(Protocol):
    """Tells what the gateway has seen of calls, as `GatewayFigures` does."""

    def view(self) -> list[JsonObject]:
        """How long the calls of the last minutes took their callers."""
        ...

    def ejected_s(self, engine: str) -> float:
        """For how long an engine still gets no calls."""
        ...

    def silent_s(self, now_s: float) -> float:
        """For how long the gateway has told nothing."""
        ...

    async def explain(self, most: int) -> JsonObject | None:
        """Why the last calls went where they went, so many of them; None: nobody answers."""
        ...

    async def ended_calls(self, since_s: float) -> JsonObject | None:
        """The calls that ended after this instant of the gateway's; None: nobody answers."""
        ...


class Status:
    """Builds snapshots; counts of ended jobs are remembered, since they never change. `tellings`
    is, by job, how it went to tell of its end; `price_per_hour` that of an engine."""

    def __init__(
        self,
        daemon: Daemon,
        gateway_url: str,
        figures: AsksGateway,
        tellings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        price_per_hour: float | None = None,
    ) -> None:
        self.daemon = daemon
        self.watch = LoopWatch()
        self.watch.writer_waits_s = daemon.writer.waits_s
        self.figures = figures
        self._gateway_url = gateway_url
        self._tellings = tellings
        self._price_per_hour = price_per_hour
        self._ended: dict[int, tuple[Counts, int]] = {}
        self._jobs: dict[str, dict[str, object]] = {}
        self._completions: dict[str, Completion] = {}

    async def snapshot(self) -> dict[str, object]:
        """The deployment: engines, switch, stalls, and every job, oldest first.

        While the store does not answer, or another process keeps it: jobs that run as they are,
        others as they were last seen.
        """
        stalled = self.daemon.writer.stalled
        self._predict()
        try:
            records = await asyncio.to_thread(jobs.list_jobs, self.daemon.store)
            self._jobs = {record.id: await self._view(record) for record in records}
        except (StoreLockedError, StoreUnreachableError) as error:
            stalled = str(error)
            await self._see_active()
        return {
            "gateway": self._gateway_url,
            "offline": self.daemon.dispatcher.is_offline_on,
            "stalled": stalled,
            "progress": self._progress(),
            "engines": self.engines,
            "felt": self.figures.view(),
            "routing": await self.figures.explain(0),
            "jobs": list(self._jobs.values()),
        }

    def _progress(self) -> dict[str, object]:
        """How the daemon and the gateway get on."""
        now_s, watch = time.monotonic(), self.watch
        return {
            "writer_waits_s": round(self.daemon.writer.waits_s(now_s), 1),
            "gateway_silent_s": round(self.figures.silent_s(now_s), 1),
            "num_loop_stalls": watch.num_stalls,
            "longest_loop_stall_s": round(watch.longest_s, 1),
            "last_loop_stall_at": watch.last_at,
        }

    async def job(self, job_id: str) -> dict[str, object]:
        """One job by id, prefix or name, with what holds it up: a stall, or no engine left."""
        stalled = self.daemon.writer.stalled
        self._predict()
        try:
            record = await asyncio.to_thread(jobs.get, self.daemon.store, job_id)
            view = self._jobs[record.id] = await self._view(record)
        except (StoreLockedError, StoreUnreachableError) as error:
            await self._see_active()
            if job_id not in self._jobs:
                raise
            view, stalled = self._jobs[job_id], str(error)
        slots = self.daemon.slots
        are_gone = all(slot.engine.state is EnginePhase.FAILED for slot in slots)
        return view | {
            "stalled": stalled,
            "engine_failure": slots[0].engine.stage if are_gone else None,
        }

    async def views(self, records: Sequence[JobRecord]) -> list[dict[str, object]]:
        """These jobs as they are now, in their order. Raises StoreError."""
        self._predict()
        return [await self._view(record) for record in records]

    @property
    def engines(self) -> list[dict[str, object]]:
        """The engines, with what their schedulers and the gateway tell."""
        return _engines(self.daemon.slots, self.figures)

    def _predict(self) -> None:
        """When the running jobs will be done; nobody knows while offline work is switched off."""
        dispatcher = self.daemon.dispatcher
        is_on = dispatcher.is_offline_on
        self._completions = dispatcher.assigner.turns.completions() if is_on else {}

    async def _see_active(self) -> None:
        """Take down how far the jobs in memory are; that does not need the store."""
        for job in list(self.daemon.active.values()):
            self._jobs[job.record.id] = await self._view(job.record)

    async def _view(self, record: JobRecord) -> dict[str, object]:
        active = self.daemon.active.get(record.seq)
        if active is not None:
            counts, num_cut = active.counts, active.num_cut
        elif record.seq in self._ended:
            counts, num_cut = self._ended[record.seq]
        else:
            counts = await asyncio.to_thread(results.count, self.daemon.store, record.seq)
            num_cut = await asyncio.to_thread(results.count_cut, self.daemon.store, record.seq)
            if record.state.is_terminal:
                self._ended[record.seq] = counts, num_cut
        stage = self.daemon.stages.get(record.id)
        view = view_job(
            record,
            counts,
            active=active,
            predicted=(
                self.daemon.dispatcher.assigner.turns.outlook(record.id),
                self._completions.get(record.id),
            ),
            stage=None if stage is None else stage.describe(),
            now_s=time.monotonic(),
        )
        engine_s, price = self.daemon.spent.spent_s.get(record.id, 0.0), self._price_per_hour
        return view | {
            "num_cut": num_cut,
            "on_done": self._tellings.get(record.id),
            "engine_s": round(engine_s, 1),
            "cost": None if price is None else engine_s / HOUR_S * price,
        }


def _engines(slots: Sequence[Slot], figures: AsksGateway) -> list[dict[str, object]]:
    return [
        {
            "name": slot.engine.name,
            "url": slot.engine.client.base_url,
            "state": str(slot.engine.state),
            "stage": slot.engine.stage,
            "in_flight": slot.window.num_rows,
            "stalled_s": round(slot.engine.progress.stalled_s, 1),
            "num_hangs": slot.engine.progress.num_hangs,
            "ejected_s": figures.ejected_s(slot.engine.name),
            "kv": slot.kv and {"tokens": slot.kv.num_tokens, "block_tokens": slot.kv.block_tokens},
            "telemetry": view_engine(slot.link),
        }
        for slot in slots
    ]
