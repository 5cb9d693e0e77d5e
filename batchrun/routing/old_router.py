"""What a router is given, and what it answers: the engines for a call, best first.

The gateway asks for online calls, the daemon for rows, the simulator for both. A caller offers only
engines that may be had at all and keeps what is its own (windows, suspects, engines that were
refused): it filters, the router ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from batchrun.pool.prefix_keys import KeyArray


@dataclass(slots=True)
class Load:
    """What the caller has on one engine: calls in flight, their prompt tokens as far as it knows
    them, and the calls that it has sent there so far."""

    num_in_flight: int = 0
    tokens_in_flight: int = 0
    num_sent: int = 0

    def add(self, tokens: int = 0) -> None:
        """A call goes to the engine."""
        self.num_in_flight += 1
        self.tokens_in_flight += tokens
        self.num_sent += 1

    def remove(self, tokens: int = 0) -> None:
        """A call has left it."""
        self.num_in_flight -= 1
        self.tokens_in_flight -= tokens


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An online call, or a row of a job (`is_offline`).

    `prefix` are the chained keys of the prompt's chunks from the first on, None where the caller
    does not know them. Rows of one job with the same `group` are for one engine; None: no group.
    Tokens are 0 where they are not known.
    """

    prompt_tokens: int = 0
    is_offline: bool = False
    group: int | None = None
    prefix: KeyArray | None = None


class Router(Protocol):
    """Ranks engines, which it knows by number. Instants are on one clock of the caller's. A router
    that needs only `rank` inherits the rest."""

    def rank(self, call: Call, loads: Mapping[int, Load], now_s: float) -> list[int]:
        """The engines of `loads`, all of them, best first. `loads` always has the same order."""
        ...

    def sent(self, call: Call, engine: int, now_s: float) -> None:
        """The call went to this engine, whatever its rank was."""

    def ended(
        self,
        call: Call,
        engine: int,
        now_s: float,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """The call has left the engine, which may have `left` before. None: nothing is known, or
        the call was not answered."""

    def evicted(self, engine: int, keys: Sequence[int]) -> None:
        """The engine holds these chunks no more."""

    def left(self, engine: int) -> None:
        """The engine has died or was removed: what it held is gone. It may come back, empty."""
