"""`GET /metrics`: the deployment in Prometheus' text form. Counters begin again with an engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.fleets import Fleets
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.view import expected_left_s
from batchrun.errors import StoreError
from batchrun.pool.pace import Completion
from batchrun.server.api.upload import Traffic
from batchrun.server.api.watch import LoopWatch
from batchrun.store import api_keys, files
from batchrun.store.api_keys import KeyLimits, limits_of
from batchrun.store.database import Store
from batchrun.types import EnginePhase
from batchrun.wire import Telemetry

PREFIX = "batchrun_"
MAX_JOBS = 100
"""More running jobs have no rows of their own."""

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily

BY_ENGINE: tuple[tuple[Family, str, str, str], ...] = (
    (GAUGE, "token_budget_tokens", "token_budget", "Most tokens of a step."),
    (GAUGE, "slo_slack_seconds", "slo.slack_s", "Least time left before an online token was due."),
    (GAUGE, "online_overdue", "slo.num_overdue", "Calls whose first token is late and awaited."),
    (GAUGE, "margin_ttft_seconds", "margin.ttft_s", "What steps leave of the bound for TTFT."),
    (GAUGE, "margin_tpot_seconds", "margin.tpot_s", "What they leave of an answer's time."),
    (
        GAUGE,
        "online_left_out",
        "slo.num_left_out",
        "Calls that no order brings in time, by the plan of the last step.",
    ),
    (COUNTER, "online_tokens", "slo.num_tokens", "Tokens that online calls got."),
    (COUNTER, "online_late_tokens", "slo.num_late_tokens", "Those that came after their bound."),
    (
        COUNTER,
        "online_late_first_tokens",
        "slo.num_late_first_tokens",
        "Online calls whose first token missed its bound.",
    ),
    (COUNTER, "online_answers", "num_answers", "Answers since their length first counted."),
    (
        COUNTER,
        "online_longer_answers",
        "num_longer_answers",
        "Those longer than nine of ten were to be.",
    ),
    (GAUGE, "online_cost_limit", "cost.online_cost", "Calls may take so many times as alone."),
    (COUNTER, "steps", "step.num_steps", "Steps of the engine."),
    (COUNTER, "step_predicted_seconds", "step.predicted_s", "Predicted time of timed steps."),
    (COUNTER, "step_measured_seconds", "step.measured_s", "Measured time of the same steps."),
    (GAUGE, "kv_capacity_blocks", "kv.total_blocks", "KV blocks in all."),
    (GAUGE, "kv_reserve_blocks", "kv.reserve_blocks", "KV blocks meant for online calls."),
    (GAUGE, "kv_forecast_blocks", "kv.forecast_blocks", "KV that online calls may want soon."),
    (COUNTER, "malformed_hints", "num_malformed_hints", "Hints that could not be read."),
    (COUNTER, "policy_errors", "num_policy_errors", "Steps whose plan failed."),
    (COUNTER, "malformed_orders", "num_malformed_orders", "Orders that could not be read."),
)
"""(kind, name without `batchrun_`, where its value stands in the telemetry, help)."""
BY_CLASS: tuple[tuple[Family, str, str, str], ...] = (
    (GAUGE, "requests_running", "num_running", "Requests that hold a place in the engine."),
    (GAUGE, "requests_waiting", "num_waiting", "Requests that wait in the engine."),
    (GAUGE, "longest_wait_seconds", "longest_wait_s", "The longest wait of those that wait now."),
    (COUNTER, "admissions", "num_admissions", "Requests admitted for the first time."),
    (COUNTER, "preemptions", "num_preemptions", "Requests preempted."),
    (COUNTER, "prompt_tokens", "num_prompt_tokens", "Prompt tokens of first admissions."),
    (COUNTER, "prefix_hit_tokens", "num_hit_tokens", "Those of them whose KV was cached."),
    (COUNTER, "computed_tokens", "num_computed_tokens", "Tokens computed."),
)
KV_STATES = (
    "online", "offline", "empty", "unneeded", "finished_online", "wanted", "online_prefix",
)  # fmt: skip
"""A KV block is in one of these states."""

Heard = Sequence[tuple[str, Telemetry]]
MAX_KEYS = 100
"""More API keys have no figures of their own."""


@dataclass(frozen=True, slots=True)
class KeyStorage:
    """What an API key stores, what it may store, and its transfers on their way."""

    name: str
    stored_bytes: int
    max_stored_bytes: int | None
    num_uploads: int
    num_downloads: int


def read_key_storage(store: Store, key_limits: KeyLimits, traffic: Traffic) -> list[KeyStorage]:
    """Of the keys that are not revoked, `MAX_KEYS` of them; none while the store does not answer.
    Blocking."""
    try:
        keys = [key for key in api_keys.list_all(store) if key.revoked_at is None]
        stored = files.stored_by_owner(store, now_s=time.time())
    except StoreError:
        return []
    return [
        KeyStorage(
            key.name,
            stored.get(key.id, 0),
            limits_of(key, key_limits).stored_bytes,
            traffic.uploads.count(key.id),
            traffic.downloads.count(key.id),
        )
        for key in keys[:MAX_KEYS]
    ]


class MetricsPage(Collector):
    """Reads the daemon again for every page; it keeps nothing."""

    def __init__(
        self, daemon: Daemon, watch: LoopWatch, restarts: Mapping[str, int], fleets: Fleets
    ) -> None:
        self._daemon, self._fleets = daemon, fleets
        self._restarts = restarts
        self._keys: Sequence[KeyStorage] = ()
        self._watch = watch
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, keys: Sequence[KeyStorage]) -> bytes:
        """The page, of the type `CONTENT_TYPE_LATEST`."""
        self._keys = keys
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric. A value that is not known has no sample."""
        dispatcher, slots = self._daemon.dispatcher, self._daemon.slots
        heard = [
            (slot.engine.name, telemetry)
            for slot in slots
            if slot.link is not None and (telemetry := slot.link.telemetry) is not None
        ]
        is_on, num_jobs = dispatcher.is_offline_on, len(dispatcher.jobs)
        yield _family(GAUGE, "offline_enabled", "1 while offline work is on.", "", [([], is_on)])
        yield _family(GAUGE, "jobs_running", "Jobs whose rows run.", "", [([], num_jobs)])
        yield from _of_role(self._daemon.store.term or 0, leads=True)
        yield from self._of_daemon()
        turns, waiting = dispatcher.assigner.turns, dispatcher.waiting
        completions = turns.completions(waiting) if is_on else {}
        yield from _of_jobs(list(dispatcher.jobs.values()), completions)
        yield from _of_slots(slots)
        yield from _of_fleets(self._fleets.view())
        yield from _of_keys(self._keys)
        for kind, name, where, text in BY_ENGINE:
            values = (([engine], attrgetter(where)(telemetry)) for engine, telemetry in heard)
            yield _family(kind, name, text, "engine", values)
        for kind, name, where, text in BY_CLASS:
            values = (
                ([engine, each], attrgetter(f"{each}.{where}")(telemetry))
                for engine, telemetry in heard
                for each in ("online", "offline")
            )
            yield _family(kind, name, text, "engine class", values)
        blocks = (
            ([engine, state], getattr(telemetry.kv, f"{state}_blocks"))
            for engine, telemetry in heard
            for state in KV_STATES
        )
        text = "KV blocks by state: held by a class of requests, or free and last used so."
        yield _family(GAUGE, "kv_blocks", text, "engine state", blocks)
        policies = (([engine, telemetry.policy], 1) for engine, telemetry in heard)
        yield _family(GAUGE, "policy", "1 for the policy in force.", "engine policy", policies)
        yield from _of_latency(heard)
        yield _of_costs(heard)

    def _of_daemon(self) -> Iterator[Metric]:
        waits_s = self._daemon.writer.waits_s(time.monotonic())
        text = "For how long results have waited to be committed."
        yield _family(GAUGE, "writer_waits_seconds", text, "", [([], waits_s)])
        text = "How often the daemon's loop stood still for long, since its start."
        yield _family(COUNTER, "loop_stalls", text, "", [([], self._watch.num_stalls)])
        text = "The longest that the daemon's loop stood still, as far as was seen."
        longest_s = self._watch.longest_s
        yield _family(GAUGE, "loop_longest_stall_seconds", text, "", [([], longest_s)])
        text = "How often the gateway was started again, since the daemon's start."
        whys = (([why], num) for why, num in self._restarts.items())
        yield _family(COUNTER, "gateway_restarts", text, "why", whys)


class _RolePage(Collector):
    """What there is to tell of a daemon that does not lead."""

    def __init__(self, term: int) -> None:
        self._term = term

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        return _of_role(self._term, leads=False)


def render_role(term: int) -> bytes:
    """The page of a daemon that stands by while another leads in this term."""
    registry = CollectorRegistry()
    registry.register(_RolePage(term))
    return generate_latest(registry)


def _of_role(term: int, *, leads: bool) -> Iterator[Metric]:
    text = "1 where this daemon leads, 0 where it stands by."
    yield _family(GAUGE, "daemon_leads", text, "", [([], leads)])
    yield _family(GAUGE, "daemon_term", "The leader's term: it only rises.", "", [([], term)])


def _family(
    kind: Family, name: str, text: str, labels: str, values: Iterable[tuple[list[str], object]]
) -> Metric:
    """A metric with a sample for each value that is a number; `labels` are words."""
    family = kind(PREFIX + name, text, labels=labels.split())
    for label_values, value in values:
        if isinstance(value, int | float):
            family.add_metric(label_values, float(value))
    return family


def _of_jobs(
    running: Sequence[ActiveJob], completions: Mapping[str, Completion]
) -> Iterator[Metric]:
    """Rows and ETA of the jobs that run, the first `MAX_JOBS` of them."""
    shown = running[:MAX_JOBS]
    rows = (
        ([job.id, job.record.name, state], num_rows)
        for job in shown
        for state, num_rows in (
            ("completed", job.counts.num_completed),
            ("failed", job.counts.num_failed),
            ("pending", job.record.num_rows - job.counts.num_done),
        )
    )
    yield _family(GAUGE, "job_rows", "Rows of a running job.", "job_id name state", rows)
    now_s = time.monotonic()
    etas = (
        ([job.id, job.record.name], expected_left_s(num_left, rows_per_s, completions.get(job.id)))
        for job in shown
        for num_left in [job.record.num_rows - job.counts.num_done]
        for rows_per_s, *_ in [job.pace.rates(now_s)]
    )
    yield _family(GAUGE, "job_eta_seconds", "Until a running job is done.", "job_id name", etas)


def _of_keys(keys: Sequence[KeyStorage]) -> Iterator[Metric]:
    stored = (([key.name], key.stored_bytes) for key in keys)
    yield _family(GAUGE, "key_stored_bytes", "Bytes that an API key has stored.", "key", stored)
    most = (([key.name], key.max_stored_bytes) for key in keys)
    yield _family(GAUGE, "key_max_stored_bytes", "Most bytes that it may store.", "key", most)
    transfers = (
        ([key.name, direction], number)
        for key in keys
        for direction, number in (("up", key.num_uploads), ("down", key.num_downloads))
    )
    text = "Uploads and downloads on their way."
    yield _family(GAUGE, "key_transfers", text, "key direction", transfers)


def _of_slots(slots: Sequence[Slot]) -> Iterator[Metric]:
    wanted = [slot for slot in slots if slot.engine.state is not EnginePhase.STOPPED]
    up = (([slot.engine.name], slot.engine.state is EnginePhase.READY) for slot in wanted)
    yield _family(GAUGE, "engine_up", "1 while the engine answers.", "engine", up)
    stalls = (([slot.engine.name], slot.engine.progress.stalled_s) for slot in slots)
    text = "For how long the engine has had work and made no progress."
    yield _family(GAUGE, "engine_stalled_seconds", text, "engine", stalls)
    hangs = (([slot.engine.name], slot.engine.progress.num_hangs) for slot in slots)
    text = "How often the engine hung, since the daemon's start."
    yield _family(COUNTER, "engine_hangs", text, "engine", hangs)
    rows = (([slot.engine.name], slot.window.num_rows) for slot in slots)
    yield _family(GAUGE, "engine_rows", "Offline rows that the engine has.", "engine", rows)


def _of_fleets(fleets: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    numbers = (
        ([fleet["name"], state], number)
        for fleet in fleets
        for state, number in fleet["replicas"].items()
    )
    text = "Replicas of a fleet: wanted, ready, and the bounds."
    yield _family(GAUGE, "fleet_replicas", text, "fleet state", numbers)
    told = [(each["name"], each["advice"]) for each in fleets if "cause" in (each["advice"] or ())]
    advised = (([name, advice["cause"]], advice["replicas"]) for name, advice in told)
    text = "Replicas that a fleet is to have by its calls and jobs, by what sets the number."
    yield _family(GAUGE, "fleet_advised_replicas", text, "fleet cause", advised)
    calls = (
        ([name, which], advice[f"{which}_engines"])
        for name, advice in told
        for which in ("expected", "high")
    )
    text = "Engines that online calls are to fill once a replica could be there."
    yield _family(GAUGE, "fleet_forecast_engines", text, "fleet forecast", calls)


def _of_costs(heard: Heard) -> Metric:
    latencies = (
        (
            [engine, latency, quantile, "true" if prefix else "false"],
            getattr(telemetry.cost, f"{prefix}{latency}_{percentile}_s"),
        )
        for engine, telemetry in heard
        for latency in ("ttft", "tpot")
        for percentile, quantile in (("p50", "0.5"), ("p99", "0.99"))
        for prefix in ("", "alone_")
    )
    text = "Latency of the calls of five minutes, as it was, and as predicted for them alone."
    labels = "engine latency quantile predicted_alone"
    return _family(GAUGE, "online_latency_seconds", text, labels, latencies)


def _of_latency(heard: Heard) -> Iterator[Metric]:
    labels = ["engine", "offline"]
    ttft = SummaryMetricFamily(
        PREFIX + "online_ttft_seconds",
        "Time to the first token of online calls, by whether its step held offline work.",
        labels=labels,
    )
    gaps = SummaryMetricFamily(
        PREFIX + "online_tpot_seconds",
        "Time from each online token to the next, by whether the step held offline work.",
        labels=labels,
    )
    for engine, telemetry in heard:
        for is_shared, latency in (("true", telemetry.shared), ("false", telemetry.alone)):
            ttft.add_metric([engine, is_shared], latency.num_first_tokens, latency.ttft_s)
            gaps.add_metric([engine, is_shared], latency.num_gaps, latency.gaps_s)
    yield ttft
    yield gaps
