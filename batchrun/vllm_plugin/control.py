"""The engine's end of its link to the daemon: orders in, telemetry out.

`EngineChannel` holds the two sockets, on a thread of its own that the scheduler never waits for:
the scheduler leaves its newest telemetry in a variable and finds checked orders in a queue. So an
engine that sleeps answers too, and the orders hold from its next step on. `Control` checks orders:
policy, token budget, the offline switch, which jobs' hints count. The scheduler calls `DaemonLink`
around each step: it hands out accepted orders and tells the daemon how things stand.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from msgspec import UNSET, UnsetType
from vllm.v1.core.sched.output import SchedulerOutput

from batchrun.errors import known_name
from batchrun.hints import Hint, RowHint
from batchrun.scheduling.policies import DEFAULT_QUEUE, POLICIES, QUEUES
from batchrun.scheduling.view import RequestView
from batchrun.types import RequestClass
from batchrun.vllm_plugin.state import EngineState
from batchrun.vllm_plugin.telemetry import LEASE_S, CallRecorder, Meter, fill_in
from batchrun.wire import (
    CHANNEL_VARIABLE,
    MAX_MESSAGE_BYTES,
    ORDERS_SUFFIX,
    SUFFIX,
    TELEMETRY_SUFFIX,
    Answer,
    KvTelemetry,
    LastSteps,
    MarginTelemetry,
    Orders,
    OrdersError,
    RecordedCalls,
    Telemetry,
    encode,
    make_label,
    read_orders,
)

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Orders that wait for the next step."""


@dataclass(frozen=True, slots=True)
class InForce:
    """How an engine works from its next step on."""

    policy: str
    token_budget: int
    is_offline_on: bool = True
    online_queue: str = DEFAULT_QUEUE

    @property
    def planned_as(self) -> tuple[str, str]:
        """The policy that makes the plans, as vLLM's own order knows no way to hold rows back, and
        its queue."""
        is_held = self.policy == "bs" and not self.is_offline_on
        return "bs+e" if is_held else self.policy, self.online_queue


class Control:
    """The door for orders. `receive` is called by the channel's thread, `take` by the scheduler's.

    `started` is what the engine was started with: the most that its token budget may be, and what
    holds where orders leave something open. `least_tokens` is the smallest budget: a token for
    each request that may run, as vLLM asks. Where it `cuts_no_image` the budget stays: as vLLM
    started, the largest image fits. `refusal` is why this engine cannot be planned, if it cannot;
    then `bs` with offline work on is all that it accepts. `calls` records online calls while orders
    ask for it.
    """

    def __init__(
        self,
        started: InForce,
        least_tokens: int,
        nonce: str,
        refusal: str | None = None,
        *,
        cuts_no_image: bool = False,
    ) -> None:
        self._started = started
        self._least_tokens = min(least_tokens, started.token_budget)
        self._nonce = nonce
        self._refusal = refusal
        self._cuts_no_image = cuts_no_image
        self._newest, self._newest_at_s = (-1, -1), -math.inf
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
        is_older = (orders.epoch, orders.number) <= self._newest
        # One that has been silent for so long leads no more: epochs of another store may be lower.
        if is_older and time.monotonic() < self._newest_at_s + LEASE_S:
            return "older orders than those in force"
        wanted = InForce(
            orders.policy or self._started.policy,
            orders.token_budget or self._started.token_budget,
            orders.is_offline_on,
            orders.online_queue or self._started.online_queue,
        )
        try:
            known_name(wanted.policy, POLICIES)
        except ValueError as error:
            return f"policy {error}"
        try:
            known_name(wanted.online_queue, QUEUES)
        except ValueError as error:
            return f"online_queue {error}"
        if self._cuts_no_image and wanted.token_budget != self._started.token_budget:
            return (
                f"the token budget stays {self._started.token_budget} here, not "
                f"{wanted.token_budget}: each image must fit into a step whole"
            )
        if not self._least_tokens <= wanted.token_budget <= self._started.token_budget:
            return (
                f"the token budget can be {self._least_tokens} to {self._started.token_budget} "
                f"here, not {wanted.token_budget}"
            )
        if self._refusal is not None and (wanted.policy != "bs" or not wanted.is_offline_on):
            return self._refusal
        self._newest, self._newest_at_s = (orders.epoch, orders.number), time.monotonic()
        self.in_force = wanted
        self._inbox.append((wanted, orders))
        return None

    def _answer(
        self, number: int, error: str | None, recording: RecordedCalls | UnsetType = UNSET
    ) -> bytes:
        now = self.in_force
        answer = Answer(
            number,
            now.policy,
            now.token_budget,
            now.is_offline_on,
            error,
            recording,
            now.online_queue,
        )
        return encode(answer)


INTERVAL_S = 0.25
"""Telemetry goes out at most so often."""
REPEAT_S = 1.0
"""Unchanged telemetry goes out so often, so that a daemon that comes later sees it."""
ORDERS_PAUSE_S = 0.02
"""Rest after each `MAX_QUEUED` orders, so that a flood of them takes no time from the steps."""
MAX_QUEUED = 16
ANSWERS_SUFFIX = ".answers"
KEEP_S = 60.0
"""How long answers are is written down so often."""


class EngineChannel:
    """Two sockets at `path` (+ `.telemetry`, `.orders`), open until `close`.

    `receive` gets each message that came in and returns the answer; it must not raise. Telemetry
    for which a peer has no room is dropped. Raises OSError when the sockets cannot be bound.
    """

    def __init__(self, path: Path, receive: Callable[[bytes], bytes]) -> None:
        self._receive = receive
        self._telemetry: Telemetry | None = None
        self._kept: tuple[Path, bytes] | None = None
        self._is_closing = threading.Event()
        # A unix socket's path has room for about 100 characters, a home may be longer.
        self._folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._context = zmq.Context()
        self._names = [path.name + ORDERS_SUFFIX, path.name + TELEMETRY_SUFFIX]
        try:
            self._orders = self._bind(zmq.ROUTER, self._names[0])
            self._publisher = self._bind(zmq.PUB, self._names[1])
        except zmq.ZMQError as error:
            self._release()
            raise OSError(error.errno, error.strerror, str(path)) from error
        self._thread = threading.Thread(target=self._run, name="batchrun-channel", daemon=True)
        self._thread.start()

    def publish(self, telemetry: Telemetry) -> None:
        """Send this, or something newer, within `INTERVAL_S`. Costs nothing here."""
        self._telemetry = telemetry

    def keep(self, path: Path, text: bytes) -> None:
        """Write this, or something newer, to a file, on the channel's thread. Costs nothing here.
        What cannot be written is left."""
        self._kept = path, text

    def close(self) -> None:
        """End the thread and remove the sockets."""
        self._is_closing.set()
        self._thread.join()
        self._release()

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = MAX_QUEUED
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.bind(f"ipc:///proc/self/fd/{self._folder_fd}/{name}")
        os.chmod(name, 0o600, dir_fd=self._folder_fd)
        return socket

    def _run(self) -> None:
        sent: Telemetry | None = None
        sent_at_s = float("-inf")
        while not self._is_closing.is_set():
            if self._orders.poll(int(INTERVAL_S * 1000)):
                self._answer_all()
                self._is_closing.wait(ORDERS_PAUSE_S)
            age_s = time.monotonic() - sent_at_s
            latest = self._telemetry
            if latest is not None and age_s >= (REPEAT_S if latest is sent else INTERVAL_S):
                sent, sent_at_s = latest, time.monotonic()
                with suppress(zmq.ZMQError):
                    self._publisher.send(encode(latest), zmq.NOBLOCK)
            self._write_kept()
        self._write_kept()

    def _write_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            path, text = kept
            with suppress(OSError):
                new = path.with_name(f"{path.name}.new")
                new.touch(0o600)
                new.write_bytes(text)
                new.replace(path)

    def _answer_all(self) -> None:
        for _ in range(MAX_QUEUED):
            try:
                sender, *parts = self._orders.recv_multipart(zmq.NOBLOCK)
                answer = self._receive(b"".join(parts))
                self._orders.send_multipart((sender, answer), zmq.NOBLOCK)
            except zmq.ZMQError:
                return

    def _release(self) -> None:
        self._context.destroy(linger=0)
        for name in self._names:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._folder_fd)
        os.close(self._folder_fd)


class DaemonLink:
    """What the daemon sees and changes of one engine, whose scheduler calls it around each step."""

    def __init__(
        self, state: EngineState, started: InForce, max_running: int, refusal: str | None
    ) -> None:
        """`max_running`: the most requests that run; `refusal`: why this engine cannot be planned,
        if it cannot."""
        self._state = state
        self._max_running = max_running
        self._channel: EngineChannel | None = None
        self._last_steps: LastSteps | None = None
        self._answers, self._served_by = Path(), state.facts.engine.model
        self._labels: dict[str, bytes] = {}
        self._report_at_s = self._keep_at_s = float("-inf")
        self._pause = 0
        self.control = Control(
            started, max_running, state.nonce, refusal, cuts_no_image=state.cuts_no_image
        )
        self.meter = Meter()

    def open(self) -> None:
        """Listen to the daemon from now on, and be heard by it."""
        path = os.environ[CHANNEL_VARIABLE]
        self._answers = Path(path + ANSWERS_SUFFIX)
        with suppress(OSError, ValueError):
            self._state.calls.recall(self._answers.read_bytes(), self._served_by)
        try:
            self._channel = EngineChannel(Path(path), self.control.receive)
        except OSError as error:
            log.warning("batchrun: no telemetry and no orders: %s", error)
        try:
            self._last_steps = LastSteps(Path(path + SUFFIX), self._max_running)
        except OSError as error:
            log.warning("batchrun: what runs is not written down for the daemon: %s", error)
        self._report(self._state.clock())

    def close(self) -> None:
        """Nothing comes in or goes out any more."""
        if self._channel is not None:
            self._channel.keep(self._answers, self._state.calls.keep(self._served_by))
            self._channel.close()
            self._channel = None
        if self._last_steps is not None:
            self._last_steps.close()
            self._last_steps = None

    def arrived(self, view: RequestView, hint: Hint | None) -> None:
        """A request has come in. Only rows of jobs can become suspects when the engine dies."""
        self.meter.arrived(view)
        if isinstance(hint, RowHint):
            self._labels[view.request_id] = make_label(hint.job, hint.row)
        elif self.control.calls.is_on and view.request_class is RequestClass.ONLINE:
            arrived_at = view.arrival_at_s + self._state.wall_offset_s
            self.control.calls.arrived(view.request_id, arrived_at)

    def left(self, view: RequestView) -> None:
        """A request has ended; the output of its last step may still be read."""
        self.meter.ending[view.request_id] = view
        self._labels.pop(view.request_id, None)
        if self.control.calls.is_on:
            lengths = view.num_prompt_tokens, view.handle.num_output_tokens
            self.control.calls.ended(view.request_id, *lengths)

    def paused(self, pause: int) -> None:
        """vLLM gives steps to fewer requests from now on, or to all again."""
        self._pause, now_s = pause, self._state.clock()
        self.meter.costs.paused(now_s)
        self._report(now_s)

    def note(self, output: SchedulerOutput, predicted_s: float, now_s: float) -> None:
        """A step was scheduled: count it, and report if it is time or nothing is left to do."""
        if self._last_steps is not None and output.total_num_scheduled_tokens:
            labels, scheduled = self._labels, output.num_scheduled_tokens
            self._last_steps.note(labels[name] for name in scheduled if name in labels)
        views = self._state.views
        if self.meter.scheduled(output, views) or self._state.num_offline:
            model = self._state.estimates.alone_model
            self.meter.costs.scheduled(output, views, model, predicted_s, now_s)
        else:
            self.meter.costs.clock.scheduled(now_s, predicted_s, None)
        self.meter.settle(now_s)
        if self._state.settings.slo == "auto":
            self.meter.costs.telemetry(now_s, self._state.settings.cost_in_force)
            self._state.slo = self.meter.costs.learnt
        if self._channel is not None and (now_s >= self._report_at_s or self._pause or not views):
            self._report(now_s)

    def telemetry(self, now_s: float) -> Telemetry:
        """How things stand. O(requests)."""
        state, in_force = self._state, self.control.in_force
        is_planned = in_force.planned_as[0] != "bs"
        state.follow_wall()
        known = Telemetry(
            start_id=self.meter.start_id,
            sent_at=now_s + state.wall_offset_s,
            policy=in_force.policy,
            token_budget=in_force.token_budget,
            max_running=self._max_running,
            is_offline_on=in_force.is_offline_on,
            online_queue=in_force.online_queue,
            pause=self._pause,
            cost=self.meter.costs.telemetry(now_s, state.settings.cost_in_force),
            kv=KvTelemetry(
                online_blocks=state.num_online_blocks(),
                reserve_blocks=state.estimates.reserve_blocks(0),
                forecast_blocks=state.estimates.forecast.forecast_blocks if is_planned else None,
            ),
            margin=MarginTelemetry(
                state.margin.now.first_share * state.slo.ttft_s,
                state.margin.now.later_tpots * state.slo.tpot_s,
            ),
            num_answers=state.calls.num_judged,
            num_longer_answers=state.calls.num_longer,
            num_malformed_hints=state.num_malformed_hints,
            num_policy_errors=state.num_policy_errors,
            num_malformed_orders=self.control.num_malformed,
        )
        return fill_in(known, self.meter, state.views, state.manager, state.block_tokens, now_s)

    def _report(self, now_s: float) -> None:
        if self._channel is not None:
            self._report_at_s = now_s + INTERVAL_S
            self._channel.publish(self.telemetry(now_s))
            if now_s >= self._keep_at_s:
                self._keep_at_s = now_s + KEEP_S
                self._channel.keep(self._answers, self._state.calls.keep(self._served_by))
