"""What the daemon wants of the engines while they run, told again and again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import UNSET

from batchrun.daemon.engine_link import EngineLink
from batchrun.errors import StateError
from batchrun.wire import MAX_JOBS, Answer, Orders, PolicyName, Recording

log = logging.getLogger(__name__)

RENEW_S = 10.0
"""A third of the lease for which an engine believes the hints of a job."""
RETRY_S = 1.0
"""An engine that is heard but gave no answer is told again after so long."""
RECORDING_LEASE_S = 15.0
"""Engines record online calls for so long after they were asked for last."""
FORGET_S = 60.0
"""So long orders name a job that ended: longer than any lease."""


@dataclass(slots=True)
class Steering:
    """Orders for all engines that listen: policy, budget, switch, and the leases of jobs.

    `links` by engine name, with the secret that its engine believes. `running_jobs` names the
    jobs whose hints count. `policy` and `token_budget` None: as each engine was started.
    """

    links: Mapping[str, tuple[EngineLink, str]]
    epoch: int
    running_jobs: Callable[[], Collection[str]]
    is_offline_on: bool = True
    policy: PolicyName | None = None
    token_budget: int | None = None
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _ended_at_s: dict[str, float] = field(default_factory=dict)
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

    async def change(
        self, policy: PolicyName | None, token_budget: int | None
    ) -> dict[str, Answer | None]:
        """Give all engines another policy and budget; returns the answers by engine.

        They stay until the daemon ends; an engine that does not listen now (None) gets them when
        it does. Raises StateError, and changes nothing, when one refuses or none listens.
        """
        self._check_links()
        before = self.policy, self.token_budget
        self.policy, self.token_budget = policy, token_budget
        answers = await self.tell_all()
        refusal = _refusal(answers)
        if refusal is not None:
            self.policy, self.token_budget = before
            await self.tell_all()
            raise StateError(refusal)
        return answers

    async def switch(self, *, on: bool) -> set[str]:
        """Turn offline work on or off in the engines; returns the names of those that obey."""
        self.is_offline_on = on
        answers = await self.tell_all()
        return {name for name, answer in answers.items() if answer and answer.error is None}

    async def collect_calls(self, numbers: Mapping[str, int]) -> dict[str, Recording | None]:
        """Online calls that have ended, by engine, from the given number or 0 on.

        Engines record from the first question on until `RECORDING_LEASE_S` after the last. None:
        the engine does not listen, or its batchrun is too old. Raises StateError without engines.
        """
        self._check_links()
        self._recording_until_s = time.monotonic() + RECORDING_LEASE_S
        answers = await self.tell_all(numbers)
        return {
            name: None if answer is None or answer.recording is UNSET else answer.recording
            for name, answer in answers.items()
        }

    async def tell_all(self, numbers: Mapping[str, int] | None = None) -> dict[str, Answer | None]:
        """Send every engine what is wanted of it; returns the answers by engine.

        With `numbers` they are asked for recorded calls, from these numbers on.
        """
        orders = [
            link.order(self._orders(nonce, None if numbers is None else numbers.get(name, 0)))
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
            answers = await self.tell_all()
            for name, answer in answers.items():
                if answer is not None and answer.error is not None:
                    log.warning("engine %s: %s", name, answer.error)
            is_missed = any(
                answer is None and self.links[name][0].telemetry is not None
                for name, answer in answers.items()
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if is_missed else RENEW_S):
                    await self._wake.wait()

    def _orders(self, nonce: str, calls_from: int | None = None) -> Orders:
        running = list(self.running_jobs())[:MAX_JOBS]
        oldest_s = time.monotonic() - FORGET_S
        for job_id in [job for job, at_s in self._ended_at_s.items() if at_s < oldest_s]:
            del self._ended_at_s[job_id]
        ended = [job_id for job_id in self._ended_at_s if job_id not in running]
        return Orders(
            nonce=nonce,
            epoch=self.epoch,
            number=next(self._numbers),
            policy=self.policy,
            token_budget=self.token_budget,
            is_offline_on=self.is_offline_on,
            renew=tuple(running),
            forget=tuple(ended[-MAX_JOBS:]),
            is_recording=time.monotonic() < self._recording_until_s,
            calls_from=calls_from,
        )


def _refusal(answers: Mapping[str, Answer | None]) -> str | None:
    """Why a change failed, in one line; None when an engine took it and none refused."""
    for name, answer in answers.items():
        if answer is not None and answer.error is not None:
            return f"engine {name}: {answer.error}"
    return None if any(answers.values()) else "no engine listens; `batchrun status` says why"
