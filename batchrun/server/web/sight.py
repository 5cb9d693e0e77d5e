"""What each view of the page shows, and who may see it: an operator all, a user key its own jobs.

A view is a function that returns what its template needs. What several open pages ask for is made
once a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.job import ActiveJob
from batchrun.engine.engine import ManagedEngine
from batchrun.errors import StateError, UnknownJobError
from batchrun.files import is_url
from batchrun.home import Home
from batchrun.jobs.results.batch_files import NO_ANSWER
from batchrun.pool.prefix_keys import CHUNK_BYTES
from batchrun.routing.routers import ROUTERS
from batchrun.server.api.errors import Caller
from batchrun.server.api.key_list import asks_for_none, limit_lines, online_usage
from batchrun.server.api.picture import Status
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.server.web.history import History, Sample
from batchrun.store import api_keys, batches, jobs, results
from batchrun.store.api_keys import limits_of
from batchrun.store.jobs import JobRecord
from batchrun.types import OFFLINE_OFF, EnginePhase, JobState

Facts = dict[str, Any]
FRESH_S = 0.9
SLOW_FRESH_S = 5.0
MAX_JOBS = 100
MAX_ERRORS_READ = 500
MAX_CAUSES = 20
SAMPLE_ROWS = 5
LARGEST_GROUPS = 8
LOG_BYTES = 4_096
SHOWN_DECISIONS = 20
CANCELLABLE = (JobState.VALIDATING, JobState.RUNNING, JobState.FINALIZING, JobState.PAUSED)
_NUMBER = re.compile(r"\d+")
_QUOTED = re.compile(r"(?s):(?!\d).*")


@dataclass(frozen=True, slots=True)
class View:
    """One view: its title in the menu, and whether only operators have it."""

    title: str
    is_for_all: bool = False


VIEWS: Mapping[str, View] = {
    "jobs": View("Jobs", is_for_all=True),
    "submit": View("Submit"),
    "promises": View("Promises"),
    "tide": View("Tide"),
    "memory": View("KV memory"),
    "engines": View("Engines"),
    "routing": View("Routing"),
    "plan": View("Plan and fact"),
    "keys": View("Keys"),
}


@dataclass(slots=True)
class Sight:
    """Looks at the deployment for the page. `router` is the name of what routes its calls.

    Methods raise StoreError.
    """

    daemon: Daemon
    status: Status
    home: Home
    history: History
    figures: GatewayFigures
    router: str
    _kept: dict[object, tuple[float, Any]] = field(default_factory=dict)
    _ended: dict[int, Facts] = field(default_factory=dict)
    _starts: dict[str, list[int]] = field(default_factory=dict)

    async def header(self, caller: Caller) -> Facts:
        """The fleet in a line, and the switch; for a user key only that it is there."""
        if not caller.is_admin:
            return {"is_admin": False}
        engines = self._engines()
        attained = [each["telemetry"]["slo"] for each in engines if each["telemetry"]]
        slacks = [slo["slack_s"] for slo in attained if slo["slack_s"] is not None]
        return {
            "is_admin": True,
            "is_offline_on": self.daemon.dispatcher.is_offline_on,
            "num_ready": sum(each["state"] == EnginePhase.READY for each in engines),
            "num_engines": len(engines),
            "num_running": len(self.daemon.active),
            "rows_per_s": sum(
                job.pace.rates(time.monotonic())[0] for job in list(self.daemon.active.values())
            ),
            "slack_s": min(slacks, default=None),
            "stalled": self.daemon.writer.stalled,
        }

    async def see(self, view: str, caller: Caller, job_id: str | None) -> Facts:
        """What the template of a view needs. Raises UnknownJobError."""
        if view == "job" and job_id is not None:
            return await self.job(caller, job_id)
        if view == "jobs":
            return {"jobs": await self.jobs(caller), "most": MAX_JOBS, "is_admin": caller.is_admin}
        makers: Mapping[str, Callable[[], Awaitable[Facts]]] = {
            "submit": self._form,
            "promises": self._promises,
            "tide": self._tide,
            "memory": self._memory,
            "engines": self._fleet,
            "routing": self._routing,
            "plan": self._plan,
            "keys": self._keys,
        }
        facts: Facts = await self._once(view, FRESH_S, makers[view])
        return facts

    async def jobs(self, caller: Caller) -> list[Facts]:
        """The newest jobs that this caller may see, the newest first, those that run before all."""

        async def read() -> list[Facts]:
            views = await (self._all_jobs() if caller.is_admin else self._batches_of(caller))
            return sorted((_shown_to(caller, view) for view in views), key=_order)

        return list(await self._once(("jobs", caller.scope), FRESH_S, read))

    async def _all_jobs(self) -> list[Facts]:
        """What has ended is read once: with a thousand jobs hardly anything changes."""
        store, active = self.daemon.store, dict(self.daemon.active)
        newest = await asyncio.to_thread(jobs.newest_states, store, MAX_JOBS)
        ended = {seq: view for seq, view in self._ended.items() if seq in newest}
        wanted = [seq for seq in newest if seq not in ended and seq not in active]
        records = await asyncio.to_thread(jobs.list_some, store, wanted) if wanted else []
        records += [job.record for job in active.values()]
        views = {view["id"]: view for view in await self._views(records)}
        self._ended = ended | {
            record.seq: views[record.id] for record in records if record.state.is_terminal
        }
        return [*views.values(), *ended.values()]

    async def _batches_of(self, caller: Caller) -> list[Facts]:
        found = await asyncio.to_thread(
            batches.list_page, self.daemon.store, limit=MAX_JOBS, scope=caller.scope
        )
        return await self._views([batch.job for batch in found])

    async def _views(self, records: Sequence[JobRecord]) -> list[Facts]:
        """Jobs as they are now; the rows of a paused one take long to count, and change little."""
        paused = [record for record in records if record.state is JobState.PAUSED]
        views = await self.status.views([record for record in records if record not in paused])
        for record in paused:
            key = ("paused", record.seq)
            views += await self._once(key, SLOW_FRESH_S, partial(self.status.views, [record]))
        return views

    async def find(self, caller: Caller, job_id: str) -> JobRecord:
        """The job with this id, if the caller may see it. Raises UnknownJobError."""
        if caller.is_admin:
            return await asyncio.to_thread(jobs.get, self.daemon.store, job_id)
        batch = await asyncio.to_thread(batches.find, self.daemon.store, job_id, scope=caller.scope)
        if batch is None:
            raise UnknownJobError(f"{job_id}: no such job")
        return batch.job

    async def job(self, caller: Caller, job_id: str) -> Facts:
        """One job: its progress, why rows failed, and the shape of its prompts."""
        record = await self.find(caller, job_id)
        (view,) = await self._views([record])
        active = self.daemon.active.get(record.seq)
        shape = None
        if active is not None:
            key = ("shape", record.seq)
            shape = await self._once(key, 3600.0, lambda: asyncio.to_thread(_shape_of, active))
        causes: Sequence[Facts] = ()
        if view["num_failed"]:
            key = ("causes", record.seq)
            read = partial(asyncio.to_thread, self._read_causes, record.seq)
            causes = await self._once(key, SLOW_FRESH_S, read)
        if not caller.is_admin:  # Whose batch it is need not learn where engines are.
            away = {"message": NO_ANSWER}
            causes = [c | (away if c["code"] == "connection_error" else {}) for c in causes]
        has_output = False
        if caller.is_admin and record.state.is_terminal:
            key = ("output", record.seq)
            has_output = await self._once(key, SLOW_FRESH_S, partial(self._has_output, record))
        return {
            "job": _shown_to(caller, view),
            "is_admin": caller.is_admin,
            "has_output": has_output,
            "shape": shape,
            "causes": causes,
            "most_errors": MAX_ERRORS_READ,
            "answers": None
            if active is None
            else {"planned": active.costs.output_tokens, "mean": active.answers.mean_tokens},
        }

    async def output(self, record: JobRecord) -> Path | None:
        """The output file that a job has written on this machine. Raises StateError once a later
        job's is in its place."""
        path = await asyncio.to_thread(_written_output, record)
        if path is not None:
            await asyncio.to_thread(results.refuse_replaced, self.daemon.store, record)
        return path

    async def _has_output(self, record: JobRecord) -> bool:
        with suppress(StateError):
            return await self.output(record) is not None
        return False

    def _read_causes(self, seq: int) -> list[Facts]:
        """Failed rows by code and message, whose numbers do not count; most frequent first."""
        groups: dict[tuple[str, str], Facts] = {}
        try:
            found = list(
                results.read(self.daemon.store, seq, failed_only=True, limit=MAX_ERRORS_READ)
            )
        except StateError as error:
            return [{"code": "-", "message": str(error), "num_rows": 0, "rows": []}]
        for result in found:
            if result.error is None:
                continue
            key = (result.error.code, _NUMBER.sub("#", result.error.message)[:200])
            group = groups.setdefault(
                key,
                {
                    "code": result.error.code,
                    "message": result.error.message[:400],
                    "num_rows": 0,
                    "rows": [],
                },
            )
            group["num_rows"] += 1
            if len(group["rows"]) < SAMPLE_ROWS:
                group["rows"].append(result.row)
        by_size = sorted(groups.values(), key=lambda group: -group["num_rows"])
        return by_size[:MAX_CAUSES]

    def _engines(self) -> list[Facts]:
        return [dict(engine) for engine in self.status.engines]

    async def _fleet(self) -> Facts:
        engines = {slot.engine.name: slot.engine for slot in self.daemon.slots}
        views = self._engines()
        for view in views:
            engine = engines[str(view["name"])]
            view["num_restarts"] = max(0, len(self._starts.get(engine.name, ())) - 1)
            view["log"] = None
            if isinstance(engine, ManagedEngine):
                view["log"] = await asyncio.to_thread(_tail_of, engine.settings.log_path)
        return {"engines": views}

    def see_starts(self) -> None:
        """Note which engines have started anew; to be called all the time."""
        for engine in (slot.engine for slot in self.daemon.slots):
            starts = self._starts.setdefault(engine.name, [])
            if engine.started and starts[-1:] != [engine.started]:
                starts.append(engine.started)

    async def _promises(self) -> Facts:
        chart = self.history.chart(
            lambda sample: (
                sample.ttft_p99_s,
                sample.alone_ttft_p99_s,
                sample.tpot_p99_s,
                sample.alone_tpot_p99_s,
            )
        )
        return {"engines": self._engines(), "chart": chart, "felt": self.figures.view()}

    async def _routing(self) -> Facts:
        """Where the calls of the last minutes went, how unevenly, and why the last of them."""
        went = self.figures.engines()
        counts = [each.num_calls for each in went]
        mean = sum(counts) / max(1, len(self._engines()))
        why = (ROUTERS[self.router].__doc__ or "").split("\n\n")[0]
        told = await self.figures.explain(SHOWN_DECISIONS) or {"engines": [], "decisions": []}
        return {
            "router": self.router,
            "why": why,
            "engines": went,
            "num_calls": sum(counts),
            "imbalance": max(counts, default=0) / mean if mean else None,
            "known": {each["engine"]: each for each in told["engines"]},
            "decisions": told["decisions"],
        }

    async def _form(self) -> Facts:
        served = {model for slot in self.daemon.slots for model in slot.models or ()}
        default = next((slot.default_model for slot in self.daemon.slots), None)
        return {"models": sorted(served - {default}), "default_model": default}

    async def _tide(self) -> Facts:
        chart = self.history.chart(
            lambda sample: (sample.online_tokens_per_s, sample.offline_tokens_per_s)
        )
        return {"chart": chart, "last": self._last()}

    async def _memory(self) -> Facts:
        engines = [each for each in self._engines() if each["telemetry"]]
        charts = {
            str(each["name"]): self.history.chart(_kv_of(str(each["name"]))) for each in engines
        }
        return {"engines": engines, "charts": charts}

    async def _plan(self) -> Facts:
        running = [job.record for job in list(self.daemon.active.values())]
        views = await self.status.views(running)
        for job, view in zip(list(self.daemon.active.values()), views, strict=False):
            view["planned_answer_tokens"] = job.costs.output_tokens
            view["mean_answer_tokens"] = job.answers.mean_tokens
        return {"jobs": views, "engines": self._engines()}

    async def _keys(self) -> Facts:
        keys = await asyncio.to_thread(self._read_keys)
        return {"keys": keys, "asks_for_none": asks_for_none(self.home.api_keys)}

    def _read_keys(self) -> list[Facts]:
        used = api_keys.usage(self.daemon.store)
        nothing = api_keys.KeyUsage(0, jobs.Counts())
        online = online_usage(self.daemon.store, self.home.key_usage)
        return [
            {
                "id": key.id,
                "name": key.name,
                "role": key.role,
                "slo_class": key.slo_class,
                "limits": limit_lines(asdict(limits_of(key, self.daemon.key_limits))),
                "is_revoked": key.revoked_at is not None,
                "batches": used.get(key.id, nothing),
                "online": online[key.seq],
            }
            for key in api_keys.list_all(self.daemon.store)
        ]

    def _last(self) -> Sample | None:
        samples = self.history.samples
        return samples[-1] if samples else None

    async def _once(self, key: object, fresh_s: float, make: Callable[[], Awaitable[Any]]) -> Any:
        """What `make` returned less than `fresh_s` ago, else what it returns now."""
        now_s = time.monotonic()
        kept = self._kept.get(key)
        if kept is not None and now_s < kept[0]:
            return kept[1]
        value = await make()
        self._kept = {old: it for old, it in self._kept.items() if now_s < it[0]}
        self._kept[key] = (time.monotonic() + fresh_s, value)
        return value


def _written_output(record: JobRecord) -> Path | None:
    place = record.output_path
    if record.is_batch or not record.has_output or is_url(place) or not place:
        return None
    path = Path(place)
    return path if path.is_file() else None


def _kv_of(engine: str) -> Callable[[Sample], Sequence[float | None]]:
    def values(sample: Sample) -> Sequence[float | None]:
        kv = sample.kv.get(engine)
        if kv is None:
            return (None,) * 6
        return kv.online, kv.offline, kv.cached, kv.empty, kv.reserve, kv.forecast

    return values


def _shown_to(caller: Caller, view: Facts) -> Facts:
    """A job's view with what may be done to it; a user key sees no path of the server's, nor what
    its stage quotes."""
    state = JobState(view["state"])
    can_run = {"pause": state in {JobState.VALIDATING, JobState.RUNNING}}
    can_run["resume"] = state is JobState.PAUSED
    actions = [name for name, can in can_run.items() if can and caller.is_admin]
    actions += ["cancel"] if state in CANCELLABLE else []
    stage = view["stage"] or ""
    stage = stage if stage == OFFLINE_OFF else _QUOTED.sub("", stage)
    hidden = {"output_path": None, "reason": None, "stage": stage}
    shown = view if caller.is_admin else view | hidden
    return shown | {"actions": actions, "is_terminal": state.is_terminal}


def _order(view: Facts) -> tuple[bool, float]:
    return bool(view["is_terminal"]), -float(view["created_at"])


def _shape_of(active: ActiveJob) -> Facts:
    """How the rows of a job share beginnings. Blocking."""
    sizes = np.bincount(active.group_of) if len(active.group_of) else np.zeros(1, dtype=np.int64)
    shared = np.sort(sizes[sizes > 1])[::-1]
    shared_bytes = active.plan.order.shared_chunks * CHUNK_BYTES
    return {
        "num_groups": len(shared),
        "num_alone": int((sizes == 1).sum()),
        "largest": shared[:LARGEST_GROUPS].tolist(),
        "mean_shared_bytes": float(shared_bytes.mean()) if len(shared_bytes) else 0.0,
        "max_shared_bytes": int(shared_bytes.max()) if len(shared_bytes) else 0,
    }


def _tail_of(path: Path) -> str:
    """The last whole lines of a log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text if size <= LOG_BYTES else text.partition("\n")[2]
