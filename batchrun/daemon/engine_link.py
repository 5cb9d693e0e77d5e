"""One engine as the daemon sees it: its slot in the dispatch, and the wire to its scheduler.

The wire brings the newest telemetry, and takes orders, which repeat all that the daemon wants.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from batchrun.config import WindowConfig
from batchrun.daemon.faults import accuse_rows
from batchrun.daemon.in_flight import Assignment, EngineSlot
from batchrun.engine.agent.engine import AgentEngine
from batchrun.engine.agent.remote import AgentClient
from batchrun.engine.client import KvConfig
from batchrun.engine.engine import AttachedEngine, ManagedEngine
from batchrun.engine.progress import SILENCE, STALE_S, Look, num_due, step_bound_s
from batchrun.engine.sockets import EngineWire
from batchrun.errors import StateError
from batchrun.pool.row_queue import Window
from batchrun.types import DEFAULT_MODEL, EnginePhase
from batchrun.wire import (
    MAX_JOBS,
    Answer,
    FeltCalls,
    Orders,
    RecordedCalls,
    Telemetry,
    encode,
    num_that_fit,
    read_last_steps,
    read_message,
)

log = logging.getLogger(__name__)

Engine = ManagedEngine | AttachedEngine | AgentEngine
"""An engine as the daemon sees it, whoever starts it."""

ANSWER_WAIT_S, LAG_S = 2.0, 1.0
"""What is heard of an engine within `LAG_S` after its answer may be older than that."""
HISTORY_S, HISTORY_STEP_S = 30.0, 1.0


class EngineLink:
    """What the scheduler of one engine says, and orders to it, over a `wire`.

    The engine may not be there, or come and go. Orders that nobody is there to take are lost: the
    next ones say everything again. Call `run` to hear anything. `on_start` is called when an engine
    is heard for the first time.
    """

    def __init__(self, wire: EngineWire, name: str) -> None:
        self.name = name
        self._wire = wire
        self._latest: tuple[float, Telemetry] | None = None
        self._said_s = -math.inf
        self._history: deque[tuple[float, Telemetry]] = deque()
        self._answer: tuple[float, Answer] | None = None
        self._awaited: dict[int, asyncio.Future[Answer]] = {}

    @property
    def telemetry(self) -> Telemetry | None:
        """What the engine said last; None when it has not been heard for `STALE_S`.

        What is in force is corrected by a newer answer: an engine that sleeps says nothing new.
        """
        if self._latest is None or time.monotonic() - self._latest[0] > STALE_S:
            return None
        telemetry = self._latest[1]
        if self._answer is None or self._answer[0] + LAG_S <= self._said_s:
            return telemetry
        answer = self._answer[1]
        return msgspec.structs.replace(
            telemetry,
            policy=answer.policy,
            token_budget=answer.token_budget,
            is_offline_on=answer.is_offline_on,
            online_queue=answer.online_queue,
        )

    @property
    def max_running(self) -> int:
        """Requests that its engine runs at once, as it told last; 0: it never did."""
        return 0 if self._latest is None else self._latest[1].max_running

    @property
    def budget_tokens(self) -> int:
        """Most tokens of a step, as the engine told last; 0: it never did."""
        return 0 if self._latest is None else self._latest[1].token_budget

    def look(self, *, has_rows: bool) -> Look | None:
        """Whether the engine gets on; `has_rows`: it has rows of ours that are to run. None when it
        was never heard.

        Its scheduler puts a new `sent_at` into the telemetry when it looks at its work, and another
        thread repeats that every second.
        """
        if self._latest is None:
            return None
        heard_s, newest = self._latest
        mark = newest.start_id, newest.sent_at
        if time.monotonic() - heard_s > STALE_S:
            return Look(mark, has_work=True, bound_s=SILENCE.bound_s)
        has_work, bound_s = num_due(newest, has_rows=has_rows) > 0, step_bound_s(newest)
        return Look(mark, has_work, bound_s, pause=newest.pause)

    @property
    def history(self) -> tuple[float, Telemetry, Telemetry] | None:
        """(seconds between them, oldest, newest) of the last `HISTORY_S` of one engine's life."""
        if len(self._history) < 2:
            return None
        (first_s, first), (last_s, last) = self._history[0], self._history[-1]
        return last_s - first_s, first, last

    async def run(self, on_start: Callable[[], None]) -> None:
        """Listen until cancelled."""
        await self._wire.run(partial(self._hear_telemetry, on_start), self._hear_answer)

    async def order(self, orders: Orders) -> Answer | None:
        """Send orders; returns the engine's answer, None when there is none in `ANSWER_WAIT_S`."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited[orders.number] = answered
        try:
            if not await self._wire.send(encode(orders)):
                return None
            async with asyncio.timeout(ANSWER_WAIT_S):
                answer = await answered
        except TimeoutError:
            return None
        finally:
            del self._awaited[orders.number]
        self._answer = (time.monotonic(), answer)
        return answer

    def _hear_answer(self, message: bytes) -> None:
        with suppress(ValueError):
            answer = read_message(message, Answer)
            if (answered := self._awaited.get(answer.number)) and not answered.done():
                answered.set_result(answer)

    def _hear_telemetry(self, on_start: Callable[[], None], message: bytes) -> None:
        try:
            telemetry = read_message(message, Telemetry)
        except ValueError as error:
            log.warning("engine %s sent telemetry that cannot be read: %s", self.name, error)
            return
        is_new = self._latest is None or self._latest[1].start_id != telemetry.start_id
        if is_new:
            self.forget()
        self._remember(time.monotonic(), telemetry)
        if is_new:
            on_start()

    def forget(self) -> None:
        """What was heard is of an engine that has gone."""
        self._latest = self._answer = None
        self._history.clear()

    def _remember(self, now_s: float, telemetry: Telemetry) -> None:
        if self._latest is None or self._latest[1].sent_at != telemetry.sent_at:
            self._said_s = now_s
        self._latest = (now_s, telemetry)
        history = self._history
        if not history or now_s - history[-1][0] >= HISTORY_STEP_S:
            history.append(self._latest)
        while history[0][0] < now_s - HISTORY_S:
            history.popleft()


RENEW_S = 10.0
"""A third of the lease for which an engine believes the hints of a job."""
RETRY_S = 1.0
"""An engine that is heard but gave no answer gets its orders again after so long."""
RECORDING_LEASE_S = 15.0
"""Engines record online calls for so long after they were asked for last."""
FORGET_S = 60.0
"""So long orders name a job that ended: longer than any lease."""


@dataclass(slots=True)
class Steering:
    """Orders for all engines that listen: policy, budget, queue, switch, and the leases of jobs.

    `links` by engine name, with the secret that its engine believes. `running_jobs` names the
    jobs whose hints count. `policy`, `token_budget` and `online_queue` None: as each engine was
    started.
    """

    links: Mapping[str, tuple[EngineLink, str]]
    epoch: int
    running_jobs: Callable[[], Collection[str]]
    is_offline_on: bool = True
    policy: str | None = None
    token_budget: int | None = None
    online_queue: str | None = None
    _felt: Mapping[str, FeltCalls] | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _ended_at_s: dict[str, float] = field(default_factory=dict)
    _told: tuple[str, ...] = ()
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _recording_until_s: float = float("-inf")

    async def run(self) -> None:
        """Listen to the engines and renew the leases, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link, _ in self.links.values():
                group.create_task(link.run(self._wake.set))
            group.create_task(self._renew())

    def forget(self, job_id: str) -> None:
        """A job no longer runs: its hints count no more, at once."""
        self._ended_at_s[job_id] = time.monotonic()
        self._wake.set()

    def callers_felt(self, felt: Mapping[str, FeltCalls]) -> None:
        """What the gateway has seen of calls, by engine; told to the engines when it is news."""
        if felt != self._felt:
            self._felt = dict(felt)
            self._wake.set()

    async def change(
        self, policy: str | None, token_budget: int | None, online_queue: str | None = None
    ) -> dict[str, Answer | None]:
        """Give all engines another policy, budget and queue; returns the answers by engine.

        They stay until the daemon ends; an engine that does not listen now (None) gets them when
        it does. Raises StateError, and changes nothing, when one refuses or none listens.
        """
        self._check_links()
        before = self.policy, self.token_budget, self.online_queue
        self.policy, self.token_budget, self.online_queue = policy, token_budget, online_queue
        answers = await self.order_all()
        if (refusal := _refusal(answers)) is not None:
            self.policy, self.token_budget, self.online_queue = before
            await self.order_all()
            raise StateError(refusal)
        return answers

    async def switch(self, *, on: bool) -> set[str]:
        """Turn offline work on or off in the engines; returns the names of those that obey."""
        self.is_offline_on = on
        answers = await self.order_all()
        return {name for name, answer in answers.items() if answer and answer.error is None}

    async def collect_calls(self, numbers: Mapping[str, int]) -> dict[str, RecordedCalls | None]:
        """Online calls that have ended, by engine, from the given number or 0 on.

        Engines record from the first question on until `RECORDING_LEASE_S` after the last. None:
        the engine does not listen, or its batchrun is too old. Raises StateError without engines.
        """
        self._check_links()
        self._recording_until_s = time.monotonic() + RECORDING_LEASE_S
        answers = await self.order_all(numbers)
        return {
            name: None if answer is None or answer.recording is UNSET else answer.recording
            for name, answer in answers.items()
        }

    async def order_all(self, numbers: Mapping[str, int] | None = None) -> dict[str, Answer | None]:
        """Orders to all engines; returns the answers, with the calls recorded from `numbers` on."""
        self._choose_ended()
        orders = [
            link.order(self._orders(name, nonce, None if numbers is None else numbers.get(name, 0)))
            for name, (link, nonce) in self.links.items()
        ]
        return dict(zip(self.links, await asyncio.gather(*orders), strict=True))

    def _check_links(self) -> None:
        if not self.links:
            raise StateError(
                "no engine runs batchrun's scheduler: only those do that batchrun starts, with a "
                "`policy` other than `vllm` in batchrun.yaml"
            )

    async def _renew(self) -> None:
        while True:
            self._wake.clear()
            answers = await self.order_all()
            for name, answer in answers.items():
                if answer is not None and answer.error is not None:
                    log.warning("engine %s: %s", name, answer.error)
            silent = [self.links[name][0] for name, answer in answers.items() if answer is None]
            is_missed = any(link.telemetry is not None for link in silent)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if is_missed else RENEW_S):
                    await self._wake.wait()

    def _choose_ended(self) -> None:
        """As many jobs as the next orders have room for; who is told now comes last next time."""
        jobs, oldest_s = self.running_jobs(), time.monotonic() - FORGET_S
        lately = {job: at_s for job, at_s in self._ended_at_s.items() if at_s >= oldest_s}
        ended = [job for job in reversed(lately) if job not in jobs]
        self._told = tuple(ended[: num_that_fit(ended, list(jobs)[:MAX_JOBS])])
        self._ended_at_s = {job: lately[job] for job in self._told} | lately

    def _orders(self, name: str, nonce: str, calls_from: int | None = None) -> Orders:
        return Orders(
            nonce=nonce,
            epoch=self.epoch,
            number=next(self._numbers),
            policy=self.policy,
            token_budget=self.token_budget,
            is_offline_on=self.is_offline_on,
            renew=tuple(self.running_jobs())[:MAX_JOBS],
            forget=self._told,
            is_recording=time.monotonic() < self._recording_until_s,
            calls_from=calls_from,
            online_queue=self.online_queue,
            felt=None if self._felt is None else self._felt.get(name, FeltCalls()),
        )


def _refusal(answers: Mapping[str, Answer | None]) -> str | None:
    """Why a change failed, in one line; None when an engine took it and none refused."""
    for name, answer in answers.items():
        if answer is not None and answer.error is not None:
            return f"engine {name}: {answer.error}"
    return None if any(answers.values()) else "no engine listens; `batchrun status` says why"


LOOK_S, MAX_LOOKS = 1.0, 180
"""180 s: longer than a process that batchrun started lives without an answer."""
GONE = frozenset({EnginePhase.RESTARTING, EnginePhase.FAILED, EnginePhase.STOPPED})
SCHEDULER_WINDOW, PLAIN_WINDOW = (256, 2_000_000), (32, 400_000)
"""(rows, prompt tokens) where batchrun.yaml says nothing."""


@dataclass(slots=True, eq=False)
class Slot(EngineSlot):
    """An engine with its process or address.

    `hint_nonce`, `link` and `last_steps` are set where batchrun's scheduler runs inside it: rows
    then carry hints, the engine can be watched and steered, and a dead one leaves a file that says
    what it ran. `kv` is None until the engine has answered; so are its `models` where there are
    several engines; `expected_model` is the one that batchrun.yaml has it serve. `accused` are the
    rows that it may have died of, None until that was looked into. `drained_for`: why it is emptied
    and gets no new work. `default_from`: the engine that is to tell `default_model` yet;
    `last_model` is the one that it told an earlier daemon.
    """

    engine: Engine
    uses_priority: bool
    default_model: str | None = None
    default_from: Slot | None = None
    last_model: str | None = None
    expected_model: str | None = None
    hint_nonce: str | None = None
    link: EngineLink | None = None
    last_steps: Path | None = None
    kv: KvConfig | None = None
    accused: Sequence[Assignment[Any, Any]] | None = None
    drained_for: set[str] = field(default_factory=set)

    @property
    def drains(self) -> bool:
        """Whether the daemon empties it."""
        return bool(self.drained_for)

    @property
    def agent(self) -> AgentClient | None:
        """The way to the engine's agent, where it has one."""
        return self.engine.client if isinstance(self.engine, AgentEngine) else None

    @property
    def orders_nonce(self) -> str:
        """What orders to its scheduler must carry, whether one was heard yet or not."""
        return self.agent.hints_secret if self.agent is not None else self.hint_nonce or ""

    @property
    def is_draining(self) -> bool:
        """Whether it ends what it has and takes nothing new."""
        return self.drains or (isinstance(self.engine, AgentEngine) and self.engine.is_draining)

    @property
    def is_usable(self) -> bool:
        is_held = self.is_down or self.drains or self.engine.progress.is_held
        return self.engine.state is EnginePhase.READY and not is_held

    @property
    def is_lost(self) -> bool:
        return self.engine.state in {EnginePhase.FAILED, EnginePhase.STOPPED}

    @property
    def is_off(self) -> bool:
        return self.engine.state is EnginePhase.STOPPED

    @property
    def runs_scheduler(self) -> bool:
        return self.hint_nonce is not None

    def serves(self, model: str) -> bool:
        """Whether the engine has this model; nothing until it was asked, all if it does not tell.

        `default_model` is what rows without a model of their own get.
        """
        named = self.default_model if model == DEFAULT_MODEL else model
        if self.models is None or (named is None and self.default_from is not None):
            return False
        return not self.models or named in self.models

    @property
    def block_tokens(self) -> int | None:
        """Tokens in a block of its KV; None where it does not tell."""
        return None if self.kv is None else self.kv.block_tokens

    @property
    def num_running(self) -> int:
        return 0 if (told := self._telemetry) is None else told.offline.num_running

    @property
    def num_arrived(self) -> int | None:
        told = self._telemetry
        return None if told is None else told.offline.num_running + told.offline.num_waiting

    @property
    def num_other_calls(self) -> int:
        telemetry, num_arrived = self._telemetry, self.num_arrived
        if telemetry is None or num_arrived is None:
            return 0
        num_flex = max(0, num_arrived - len(self.in_flight))
        return telemetry.online.num_running + telemetry.online.num_waiting + num_flex

    @property
    def _telemetry(self) -> Telemetry | None:
        return None if self.link is None else self.link.telemetry

    async def watch_progress(self, is_offline_on: Callable[[], bool]) -> None:
        """Keep the engine's `progress` true, until cancelled. Where its scheduler tells nothing,
        its metrics do. While offline work is off, rows may sit in the engine without a step."""
        while True:
            if self.engine.state in {EnginePhase.READY, EnginePhase.UNREACHABLE}:
                has_rows = self.has_sent and is_offline_on()
                link, told = self.link, None if self.agent is None else self.agent.state
                if link is not None and told is not None and not told.runs_scheduler:
                    link.forget()
                look = link.look(has_rows=has_rows) if link is not None else None
                if look is None:
                    look = await self.engine.client.look()
                    if look is SILENCE:
                        look = replace(look, has_work=has_rows)
                newest_s = self.newest_s if has_rows else -math.inf
                self.engine.progress.see(look, time.monotonic(), newest_s)
            await asyncio.sleep(LOOK_S)

    async def has_ended(self) -> bool:
        """Whether the engine's process of now has ended. One that lives and gives no answer is
        waited for, until it is heard or started anew; of an attached one two looks must do, and of
        one whose agent is gone `MAX_LOOKS`."""
        engine, started = self.engine, self.engine.started
        num_looks = 2 if isinstance(engine, AttachedEngine) else MAX_LOOKS
        while num_looks and engine.started in {0, started} and engine.state not in GONE:
            if await engine.client.is_healthy():
                return False
            num_looks -= 1
            await asyncio.sleep(LOOK_S)
        return True

    def accuse(self) -> Sequence[Assignment[Any, Any]]:
        """The engine died: find the rows that it may have died of, all of them suspects now."""
        last = frozenset() if self.last_steps is None else read_last_steps(self.last_steps)
        if isinstance(self.engine, AgentEngine):
            last = self.engine.last_steps
        trials = {key: assignment.trials for key, assignment in self.in_flight.items()}
        self.accused = [self.in_flight[key] for key in accuse_rows(trials, last, self.alone)]
        return self.accused

    def came_back(self) -> None:
        self.is_down, self.accused = False, None


def window_of(config: WindowConfig, *, runs_scheduler: bool) -> Window:
    """batchrun's scheduler chooses among many candidates; vLLM's own runs them as they come."""
    requests, tokens = SCHEDULER_WINDOW if runs_scheduler else PLAIN_WINDOW
    return Window(config.requests or requests, config.tokens or tokens)


def choose_default(slots: Sequence[Slot]) -> None:
    """Rows without a model of their own get the first model of the first engine that is wanted, be
    it there or not, as it tells or told last; engines that do not tell are passed over."""
    telling = (slot for slot in slots if slot.models != () or slot.expected_model is not None)
    first = next((slot for slot in telling if not slot.is_off), None)
    told = None if first is None else (first.models or (first.expected_model,))[0]
    default = told if first is None or told else first.last_model
    for slot in slots:
        slot.default_model, slot.default_from = default, None if told else first
