"""What was promised to online users, and how many of a window's calls got it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TARGET = 0.99


@dataclass(frozen=True, slots=True)
class Promise:
    """Of a window's calls the share `target` is to have its first token `ttft_s` after it arrived,
    and the same share a mean time of `tpot_s` between its tokens."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    target: float = DEFAULT_TARGET

    def may_miss(self, num_calls: int) -> int:
        """How many of so many calls may miss a bound."""
        return int((1 - self.target) * num_calls + 1e-9)


@dataclass(frozen=True, slots=True)
class Attainment:
    """What a window's calls got on `num_engines`.

    `num_timed` calls had two tokens or more by the end, and so a TPOT.
    """

    num_engines: int
    num_calls: int
    num_ttft_missed: int
    num_timed: int
    num_tpot_missed: int
    ttft_p99_s: float | None
    tpot_p99_s: float | None

    @property
    def ttft_share(self) -> float:
        """The share of calls within the TTFT bound."""
        return 1 - self.num_ttft_missed / self.num_calls

    @property
    def tpot_share(self) -> float:
        """The share of calls within the TPOT bound, of those that have one."""
        return 1 - self.num_tpot_missed / self.num_timed if self.num_timed else 1.0

    def holds(self, promise: Promise) -> bool:
        """Whether both bounds hold for the promised share of calls."""
        return self.num_ttft_missed <= promise.may_miss(
            self.num_calls
        ) and self.num_tpot_missed <= promise.may_miss(self.num_timed)

    def record(self, promise: Promise) -> dict[str, object]:
        """As plain values."""
        return {
            "num_engines": self.num_engines,
            "holds": self.holds(promise),
            "num_calls": self.num_calls,
            "ttft_kept": self.ttft_share,
            "tpot_kept": self.tpot_share,
            "ttft_p99_s": self.ttft_p99_s,
            "tpot_p99_s": self.tpot_p99_s,
        }
