"""What the windows of `benchmarks.cpu_colocation` say: pairs, which of them count, and the bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.records import Bar

Window = Mapping[str, object]

LEAST_WORKER_SHARE = 0.85
"""A worker that got less of its core was disturbed: its pair does not count."""
BROKEN_ATTAINMENT = 0.4
"""Hand-grouped vLLM is held against where it keeps its promises to fewer calls than this."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two windows of one seed: `echo` and what it is held against."""

    seed: int
    echo: Window
    other: Window

    @property
    def is_kept(self) -> bool:
        """Whether both workers got their core; decided by that alone."""
        shares = (number(w, "worker_cpu_share") for w in (self.echo, self.other))
        return all(share >= LEAST_WORKER_SHARE for share in shares)

    @property
    def ratio(self) -> float:
        """Offline tokens/s of `echo` by the other's."""
        return _by(number(self.echo, SERVED), number(self.other, SERVED))

    @property
    def ratio_per_cpu_s(self) -> float:
        """The same for each second of worker CPU."""
        return _by(_served_per_cpu_s(self.echo), _served_per_cpu_s(self.other))


SERVED = "offline_tokens_per_s"


def pairs_of(windows: Sequence[Window], other: str) -> list[Pair]:
    """`echo` beside each window of server `other` (`bs` or `grouped`) with the same seed."""
    by_key = {(window["server"], window["seed"]): window for window in windows}
    pairs = []
    for (server, seed), window in by_key.items():
        if server == other and ("echo", seed) in by_key:
            assert isinstance(seed, int)
            pairs.append(Pair(seed, by_key["echo", seed], window))
    return sorted(pairs, key=lambda pair: pair.seed)


def pair_records(pairs: Sequence[Pair], other: str) -> list[dict[str, object]]:
    """One flat record a pair, the dropped ones included."""
    return [
        {
            "kind": "pair",
            "against": other,
            "seed": pair.seed,
            "is_kept": pair.is_kept,
            "ratio": pair.ratio,
            "ratio_per_cpu_s": pair.ratio_per_cpu_s,
        }
        for pair in pairs
    ]


def bars(windows: Sequence[Window]) -> list[Bar]:
    """The figures that must hold, over the pairs that count; none when none does."""
    kept = [pair for pair in pairs_of(windows, "bs") if pair.is_kept]
    if not kept:
        return []
    echo = [pair.echo for pair in kept]
    found = [
        Bar("pairs that count", len(kept)),
        Bar("echo / bs, median", median(pair.ratio for pair in kept), 2.0),
        Bar("the same per second of worker CPU", median(p.ratio_per_cpu_s for p in kept), 2.5),
        Bar("the lowest pair", min(pair.ratio for pair in kept), 1.5),
        Bar("attainment of echo", median(number(w, "slo_attainment") for w in echo), 0.95),
        Bar("hit rate of echo", median(number(w, "prefix_hit_rate") for w in echo), 0.80),
    ]
    return found + list(_grouped_bars(windows))


def _grouped_bars(windows: Sequence[Window]) -> list[Bar]:
    kept = [pair for pair in pairs_of(windows, "grouped") if pair.is_kept]
    if not kept:
        return []
    attainment = median(number(pair.other, "slo_attainment") for pair in kept)
    bound = 0.75 if attainment < BROKEN_ATTAINMENT else None
    return [
        Bar("attainment of bs on grouped rows", attainment),
        Bar("echo / bs on grouped rows", median(pair.ratio for pair in kept), bound),
    ]


def number(window: Window, key: str) -> float:
    """A figure of a window; 0 where it has none."""
    value = window.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _served_per_cpu_s(window: Window) -> float:
    return _by(number(window, SERVED), number(window, "worker_cpu_share"))


def _by(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
