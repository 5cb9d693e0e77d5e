"""What the gateway counts of the calls that pass: by route, by class, by engine; and of its
workers, those that had to be replaced.

All workers of a gateway count into one memory, each in rows of its own, so that nobody waits for
another; who reads adds the rows up. A worker that starts again goes on with its rows. The memory
lies on no disk: a full one stops no call. Counts begin again with the gateway.
"""

from __future__ import annotations

import logging
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchrun.hints import SloBounds
from batchrun.routing.decisions import NUM_KEPT, EngineRouting, imbalance_of
from batchrun.server.gateway.shared_book import MAX_ENGINES

log = logging.getLogger(__name__)

TTFT_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
TPOT_BOUNDS_S = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0,
    5.0,
)  # fmt: skip
NUM_BUCKETS = len(TTFT_BOUNDS_S) + 1
NUM_VALUES = NUM_BUCKETS + 1
"""A histogram: its buckets, the last without a bound, and the sum."""
SERIES_OF_AN_ENGINE = 2
MAX_SERIES = SERIES_OF_AN_ENGINE * MAX_ENGINES + 256
"""Of one worker; what comes after them is not counted."""
NAME_BYTES = 192
CALLS, TTFT, TPOT, ENGINE, REPLACED = "calls", "ttft", "tpot", "engine", "replaced"
FELT = "felt"
STUCK, ENDED = "stuck", "ended"
"""Why a worker was replaced."""
EJECTED = "ejected"
"""Kept elsewhere: for how many seconds an engine still gets no calls, and how often that was."""
_BETWEEN = "\x1f"
_ROW = np.dtype([("name", f"S{NAME_BYTES}"), ("values", np.float64, (NUM_VALUES,))])

FloatArray = npt.NDArray[np.float64]
Ejected = Sequence[tuple[str, float, int]]
"""Engines by name, for how many seconds they get no calls, and how often that was."""


def create_tally(num_workers: int) -> int:
    """A file descriptor of new memory, empty, with a place for who watches the workers too. Raises
    OSError."""
    fd = os.memfd_create("batchrun-tally")
    os.truncate(fd, _ROW.itemsize * MAX_SERIES * (num_workers + 1))
    return fd


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind and these labels. Of `CALLS`: [calls]; of `ENGINE`: [calls, prompt,
    cached, output tokens]; of `FELT`: [first tokens, late ones, answers, those of a late TPOT]; of
    `REPLACED`: [workers]; of `TTFT` and `TPOT`: a histogram in
    seconds."""

    kind: str
    labels: tuple[str, ...]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class SeenReply:
    """How a reply went: `tpot_s` and `ttft_s` are None where nobody could see them, `bounds` where
    nothing is promised."""

    slo_class: str
    engine: str
    ttft_s: float | None
    tpot_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    bounds: SloBounds | None = None


class Tally:
    """The memory behind a descriptor; `worker` counts from 0, and is `num_workers` for who watches
    them."""

    def __init__(self, fd: int, num_workers: int, worker: int) -> None:
        self._memory = mmap.mmap(fd, 0)
        rows: npt.NDArray[Any] = np.frombuffer(self._memory, _ROW).reshape(-1, MAX_SERIES)
        assert len(rows) == num_workers + 1
        self._all = rows
        self._own = rows[worker]
        self._has_warned = False
        names = self._own["name"].tolist()
        self._places = {name: place for place, name in enumerate(names) if name}

    def count_call(self, route: str, status: int) -> None:
        """A call was answered."""
        self._add((CALLS, route, str(status)), 0, 1.0)

    def count_reply(self, reply: SeenReply) -> None:
        """An engine's reply is over."""
        told = (1.0, reply.prompt_tokens, reply.cached_tokens, reply.output_tokens)
        for index, value in enumerate(told):
            self._add((ENGINE, reply.engine), index, value)
        if reply.bounds is not None:
            promised = ((reply.ttft_s, reply.bounds.ttft_s), (reply.tpot_s, reply.bounds.tpot_s))
            for index, (seconds, bound_s) in enumerate(promised):
                if seconds is not None:
                    self._add((FELT, reply.engine), 2 * index, 1.0)
                    self._add((FELT, reply.engine), 2 * index + 1, float(seconds > bound_s))
        for kind, bounds, seconds in (
            (TTFT, TTFT_BOUNDS_S, reply.ttft_s),
            (TPOT, TPOT_BOUNDS_S, reply.tpot_s),
        ):
            if seconds is not None:
                self._add((kind, reply.slo_class), bisect_left(bounds, seconds), 1.0)
                self._add((kind, reply.slo_class), NUM_BUCKETS, seconds)

    def count_late(self, engine: str) -> None:
        """A stream with a bound ended beyond it without a first token."""
        for index in (0, 1):
            self._add((FELT, engine), index, 1.0)

    def count_replaced(self, why: str) -> None:
        """A worker ended, or was ended; another takes its place."""
        self._add((REPLACED, why), 0, 1.0)

    def read(self) -> list[Series]:
        """What all workers have counted, in order of kind and labels."""
        sums: dict[bytes, FloatArray] = {}
        for row in self._all[self._all["name"] != b""]:
            name = bytes(row["name"])
            sums[name] = sums.get(name, 0.0) + row["values"]
        parts = {name: name.decode("utf-8", "replace").split(_BETWEEN) for name in sorted(sums)}
        return [Series(kind, tuple(rest), sums[name]) for name, (kind, *rest) in parts.items()]

    def _add(self, labels: Sequence[str], index: int, value: float) -> None:
        name = _BETWEEN.join(labels).encode()[:NAME_BYTES]
        place = self._places.get(name)
        if place is None:
            place = len(self._places)
            if place >= MAX_SERIES:
                self._warn()
                return
            self._places[name] = place
            self._own["name"][place] = name
        self._own["values"][place, index] += value

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("there is room for %d series of figures; new ones are lost", MAX_SERIES)


class TallyPage(Collector):
    """The tally in Prometheus' text form, what routers know by engine, and which are ejected."""

    def __init__(
        self,
        tally: Tally,
        routing: Callable[[], Sequence[EngineRouting]],
        ejected: Callable[[], Ejected],
    ) -> None:
        self._tally = tally
        self._routing = routing
        self._ejected = ejected
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._is_daemon_up = False

    def render(self, *, is_daemon_up: bool) -> bytes:
        """The page; whether the daemon answered is a metric too."""
        self._is_daemon_up = is_daemon_up
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric; a series that never was has no sample."""
        up = GaugeMetricFamily("batchrun_daemon_up", "1 while the daemon answers the gateway.")
        up.add_metric([], float(self._is_daemon_up))
        yield up
        series = self._tally.read()
        calls = CounterMetricFamily(
            "batchrun_gateway_calls", "Calls answered.", labels=["route", "status"]
        )
        for each in (one for one in series if one.kind == CALLS):
            calls.add_metric(each.labels, each.values[0])
        yield calls
        replaced = CounterMetricFamily(
            "batchrun_gateway_replaced_workers", "Workers that had to be replaced.", labels=["why"]
        )
        for each in (one for one in series if one.kind == REPLACED):
            replaced.add_metric(each.labels, each.values[0])
        yield replaced
        yield from _of_engines([one for one in series if one.kind == ENGINE])
        yield from _of_promises([one for one in series if one.kind == FELT])
        yield from _of_ejections(self._ejected())
        yield from _of_routing(self._routing())
        for kind, name, bounds, text in (
            (TTFT, "ttft", TTFT_BOUNDS_S, "Time to the first piece of a streamed reply."),
            (TPOT, "tpot", TPOT_BOUNDS_S, "Time between tokens, the mean of a streamed reply."),
        ):
            full = f"batchrun_gateway_{name}_seconds"
            family = HistogramMetricFamily(full, text, labels=["class"])
            for each in (one for one in series if one.kind == kind):
                family.add_metric(each.labels, buckets_of(each, bounds), each.values[NUM_BUCKETS])
            yield family


def _of_engines(series: Sequence[Series]) -> Iterator[Metric]:
    for index, name, text in (
        (0, "calls", "Calls that went to the engine and were answered."),
        (1, "prompt_tokens", "Prompt tokens that its replies told."),
        (2, "cached_tokens", "Those of them that were cached."),
        (3, "output_tokens", "Output tokens that its replies told, or pieces of streams."),
    ):
        family = CounterMetricFamily(f"batchrun_gateway_engine_{name}", text, labels=["engine"])
        for each in series:
            family.add_metric(each.labels, each.values[index])
        yield family


def _of_promises(series: Sequence[Series]) -> Iterator[Metric]:
    labels = ["engine", "latency"]
    told = CounterMetricFamily(
        "batchrun_gateway_promised_calls", "Streamed calls with a bound, as seen.", labels=labels
    )
    late = CounterMetricFamily(
        "batchrun_gateway_late_calls", "Those of them that were beyond it.", labels=labels
    )
    for each in series:
        for index, latency in enumerate((TTFT, TPOT)):
            told.add_metric([*each.labels, latency], each.values[2 * index])
            late.add_metric([*each.labels, latency], each.values[2 * index + 1])
    yield told
    yield late


def _of_ejections(ejected: Ejected) -> Iterator[Metric]:
    name = "batchrun_gateway_engine_ejected_seconds"
    text = "For how long the engine still gets no calls, because they failed in a row."
    lefts = GaugeMetricFamily(name, text, labels=["engine"])
    times = CounterMetricFamily(
        "batchrun_gateway_engine_ejections", "How often that was.", labels=["engine"]
    )
    for engine, left_s, num_times in ejected:
        lefts.add_metric([engine], left_s)
        times.add_metric([engine], num_times)
    yield lefts
    yield times


def _of_routing(engines: Sequence[EngineRouting]) -> Iterator[Metric]:
    text = f"Calls of the busiest engine over the mean, of the last {NUM_KEPT:,}."
    imbalance = GaugeMetricFamily("batchrun_routing_imbalance", text)
    if (ratio := imbalance_of(engines)) is not None:
        imbalance.add_metric([], ratio)
    yield imbalance
    for name, field, text in (
        ("calls", "num_calls", f"Of the last {NUM_KEPT:,} calls, those that went to the engine."),
        ("hit_rate", "hit_rate", "Part of their prompts that was cached, as replies told."),
        ("agreement", "agreement", "Part of them whose cached tokens were foretold, to a piece."),
        ("index_pieces", "num_pieces", "Pieces of 1,024 bytes that the engine is taken to hold."),
    ):
        family = GaugeMetricFamily(f"batchrun_routing_{name}", text, labels=["engine"])
        for each in engines:
            if (value := getattr(each, field)) is not None:
                family.add_metric([each.engine], value)
        yield family


def buckets_of(series: Series, bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    counts = np.cumsum(series.values[:NUM_BUCKETS]).tolist()
    return list(zip([*map(str, bounds), "+Inf"], counts, strict=True))
