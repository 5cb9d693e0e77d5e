"""What the page's charts show: a sample of the deployment every two seconds, kept over restarts.

The file is JSON Lines, appended to, and written again with the samples that are still wanted once
it holds twice as many. Samples are for people to look at: a line that broke off is passed over, and
a full disk costs samples only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.view import view_engine
from batchrun.files import write_atomically
from batchrun.server.web.gateway_figures import GatewayFigures

log = logging.getLogger(__name__)

SAMPLE_S = 2.0
MAX_SAMPLES = 900
CHART_S = MAX_SAMPLES * SAMPLE_S
"""Half an hour."""
MAX_LINE_BYTES = 65_536
CHART_POINTS = 300
GAP_S = 10.0
"""Where nothing was sampled for longer, a chart's lines break."""


class KvSample(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks of one engine, as in `KvTelemetry`; `cached` are free ones that hold something."""

    online: int
    offline: int
    cached: int
    empty: int
    reserve: int
    forecast: int | None


class Sample(msgspec.Struct, frozen=True):
    """One look at the deployment; `at` in UTC epoch seconds. None: nobody knew.

    Tokens are computed ones, per second. Latencies are in seconds, of the engine with the worst;
    `alone_` ones are predicted for the same calls without offline work.
    """

    at: float
    online_tokens_per_s: float | None = None
    offline_tokens_per_s: float | None = None
    rows_per_s: float = 0.0
    ttft_p99_s: float | None = None
    alone_ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    alone_tpot_p99_s: float | None = None
    kv: Mapping[str, KvSample] = {}


class History:
    """The newest samples, oldest first, in memory and in a file."""

    def __init__(self, path: Path, *, most: int = MAX_SAMPLES) -> None:
        """Takes up what the file holds. Blocking."""
        self._path = path
        self._most = most
        self._num_lines, found = _read(path)
        self._samples: deque[Sample] = deque(found, maxlen=most)
        self._complaint: str | None = None

    @property
    def samples(self) -> Sequence[Sample]:
        return list(self._samples)

    def add(self, sample: Sample) -> None:
        """Keep one more. Blocking."""
        self._samples.append(sample)
        try:
            self._write(sample)
        except OSError as error:
            if str(error) != self._complaint:
                log.warning("samples for the page are not kept: %s", error)
            self._complaint = str(error)

    def _write(self, sample: Sample) -> None:
        if self._num_lines >= 2 * self._most:
            lines = b"".join(map(_line, self._samples))
            write_atomically(self._path, lines, mode=0o600)
            self._num_lines = len(self._samples)
            return
        with self._path.open("ab") as file:
            self._path.chmod(0o600)
            file.write(_line(sample))
        self._num_lines += 1

    def chart(self, values: Callable[[Sample], Sequence[float | None]]) -> list[list[float | None]]:
        """[instants, first series, second series, ...] of the last half hour, in at most
        `CHART_POINTS` points and one of None for each gap. Instants rise: of samples from before
        the clock was set back, those that it has yet to come to are left out."""
        samples: list[Sample] = []
        for sample in reversed(self.samples):
            if not samples or samples[0].at - CHART_S < sample.at < samples[-1].at:
                samples.append(sample)
        step = -(-len(samples) // CHART_POINTS) or 1
        rows: list[list[float | None]] = []
        before_s = math.inf
        for sample in reversed(samples[::step]):
            row = [round(sample.at, 1), *values(sample)]
            if sample.at - before_s > (step - 1) * SAMPLE_S + GAP_S:
                rows.append([round(before_s + SAMPLE_S, 1), *[None] * (len(row) - 1)])
            rows.append(row)
            before_s = sample.at
        return [list(column) for column in zip(*rows, strict=True)]


def _line(sample: Sample) -> bytes:
    return msgspec.json.encode(sample) + b"\n"


def _read(path: Path) -> tuple[int, list[Sample]]:
    """How many lines the file has, and the newest samples in it."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return 0, []
    found: list[Sample] = []
    for line in lines[-2 * MAX_SAMPLES :]:
        try:
            found.append(msgspec.json.decode(line[:MAX_LINE_BYTES], type=Sample))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return len(lines), found


async def keep_history(
    daemon: Daemon, history: History, figures: GatewayFigures, see: Callable[[], None]
) -> None:
    """Take a sample every `SAMPLE_S`, and call `see`, until cancelled."""
    async with aiohttp.ClientSession() as session:
        while True:
            see()
            await figures.look(session, time.monotonic())
            if (felt := figures.felt_calls()) is not None:
                daemon.steering.callers_felt(felt)
            sample = take_sample(daemon, figures, at=time.time(), now_s=time.monotonic())
            await asyncio.to_thread(history.add, sample)
            await asyncio.sleep(SAMPLE_S)


def take_sample(daemon: Daemon, figures: GatewayFigures, *, at: float, now_s: float) -> Sample:
    """What the daemon knows now, at `now_s` (monotonic).

    Tokens are those that engines tell; where one tells nothing, online ones are those of the
    replies that passed the gateway, and offline ones those of the rows that came back.
    """
    rates = [job.pace.rates(now_s) for job in list(daemon.active.values())]
    views = [view_engine(slot.link) for slot in daemon.slots]
    told = [view for view in views if view is not None]
    is_all_told = bool(told) and len(told) == len(views)
    costs = [view["cost"] for view in told]

    def worst(name: str) -> float | None:
        return max((cost[name] for cost in costs if cost[name] is not None), default=None)

    return Sample(
        at,
        _sum_known([view["online"]["computed_tokens_per_s"] for view in told])
        if is_all_told
        else figures.tokens_per_s,
        _sum_known([view["offline"]["computed_tokens_per_s"] for view in told])
        if is_all_told
        else sum(computed for _, _, computed in rates),
        sum(rows for rows, _, _ in rates),
        worst("ttft_p99_s"),
        worst("alone_ttft_p99_s"),
        worst("tpot_p99_s"),
        worst("alone_tpot_p99_s"),
        kv=_kv_of(daemon.slots),
    )


def _sum_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _kv_of(slots: Sequence[Slot]) -> dict[str, KvSample]:
    found: dict[str, KvSample] = {}
    for slot in slots:
        telemetry = None if slot.link is None else slot.link.telemetry
        if telemetry is None or not telemetry.kv.total_blocks:
            continue
        kv = telemetry.kv
        empty = kv.empty_blocks or 0
        found[slot.engine.name] = KvSample(
            kv.online_blocks,
            kv.offline_blocks,
            max(0, kv.free_blocks - empty),
            empty,
            kv.reserve_blocks,
            kv.forecast_blocks,
        )
    return found
