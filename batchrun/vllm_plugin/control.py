"""What the daemon may change in a running engine: policy, token budget, the offline switch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from batchrun.vllm_plugin.call_recorder import CallRecorder
from batchrun.wire import Answer, Orders, OrdersError, Recording, encode, read_orders

MAX_WAITING = 256
"""Orders that wait for the next step."""


@dataclass(frozen=True, slots=True)
class InForce:
    """How an engine works from its next step on."""

    policy: str
    token_budget: int
    is_offline_on: bool = True


class Control:
    """The door for orders. `receive` is called by the channel's thread, `take` by the scheduler's.

    `started` is what the engine was started with: the most that its token budget may be, and what
    holds where orders leave something open. `least_tokens` is the smallest budget: a token for
    each request that may run, as vLLM asks. `refusal` is why this engine cannot be planned, if it
    cannot; then `bs` with offline work on is all that it accepts. `calls` records online calls
    while orders ask for it.
    """

    def __init__(
        self, started: InForce, least_tokens: int, nonce: str, refusal: str | None = None
    ) -> None:
        self._started = started
        self._least_tokens = min(least_tokens, started.token_budget)
        self._nonce = nonce
        self._refusal = refusal
        self._newest = (-1, -1)
        # The newest orders alone count, so an engine that sleeps long may lose older ones.
        self._inbox: deque[tuple[InForce, Orders]] = deque(maxlen=MAX_WAITING)
        self.calls = CallRecorder()
        self.in_force = started
        self.num_malformed = 0

    def receive(self, message: bytes) -> bytes:
        """Check orders and keep them for the next step; returns the answer. Raises nothing."""
        try:
            orders = read_orders(message, self._nonce)
        except OrdersError as error:
            self.num_malformed += 1
            return self._answer(0, str(error))
        refusal = self._accept(orders)
        if refusal is not None:
            return self._answer(orders.number, refusal)
        self.calls.switch(on=orders.is_recording)
        is_asked = orders.is_recording and orders.calls_from is not None
        recording = self.calls.collect(orders.calls_from or 0) if is_asked else UNSET
        return self._answer(orders.number, None, recording)

    def take(self) -> tuple[InForce, Orders] | None:
        """The next accepted orders, once each, oldest first; None while there are none. O(1)."""
        return self._inbox.popleft() if self._inbox else None

    def _accept(self, orders: Orders) -> str | None:
        """Why the orders are refused; None when they hold from now on."""
        if (orders.epoch, orders.number) <= self._newest:
            return "older orders than those in force"
        wanted = InForce(
            orders.policy or self._started.policy,
            orders.token_budget or self._started.token_budget,
            orders.is_offline_on,
        )
        if not self._least_tokens <= wanted.token_budget <= self._started.token_budget:
            return (
                f"the token budget can be {self._least_tokens} to {self._started.token_budget} "
                f"here, not {wanted.token_budget}"
            )
        if self._refusal is not None and (wanted.policy != "bs" or not wanted.is_offline_on):
            return self._refusal
        self._newest = (orders.epoch, orders.number)
        self.in_force = wanted
        self._inbox.append((wanted, orders))
        return None

    def _answer(
        self, number: int, error: str | None, recording: Recording | UnsetType = UNSET
    ) -> bytes:
        now = self.in_force
        answer = Answer(number, now.policy, now.token_budget, now.is_offline_on, error, recording)
        return encode(answer)
