"""Carries out what was ordered in the homes of daemons that stand by."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import dataclass

import aiohttp

from batchrun.errors import StoreError
from batchrun.home import CONTROL_PREFIX, DaemonAddress
from batchrun.store.database import Store
from batchrun.store.orders import (
    LONGEST_S,
    Order,
    OrderAnswer,
    answer_order,
    forget_answers,
    take_orders,
)

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often the leader looks whether there are orders."""
TROUBLE_S = 5.0


@dataclass(frozen=True, slots=True)
class OrderTaker:
    """Passes the orders in `store` to the control routes at `address`, of this very daemon."""

    store: Store
    address: DaemonAddress

    async def run(self) -> None:
        """Take orders until cancelled; those that are being carried out end unanswered then."""
        timeout = aiohttp.ClientTimeout(total=LONGEST_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            tidied_s = -math.inf
            while True:
                try:
                    if time.monotonic() > tidied_s + LONGEST_S:
                        await asyncio.to_thread(forget_answers, self.store)
                        tidied_s = time.monotonic()
                    taken = await asyncio.to_thread(take_orders, self.store)
                except StoreError:
                    # Whoever leads by now takes them; that it is not us is found out elsewhere.
                    await asyncio.sleep(TROUBLE_S)
                    continue
                for number, order in taken.items():
                    tasks.create_task(self._carry_out(session, number, order))
                await asyncio.sleep(LOOK_S)

    async def _carry_out(self, session: aiohttp.ClientSession, number: str, order: Order) -> None:
        level = logging.DEBUG if order.method == "GET" else logging.INFO
        log.log(level, "ordered in another home: %s %s", order.method, order.path)
        answer = await self._ask(session, order)
        try:
            await asyncio.to_thread(answer_order, self.store, number, answer)
        except StoreError as error:
            log.error("%s %s was carried out; not told: %s", order.method, order.path, error)

    async def _ask(self, session: aiohttp.ClientSession, order: Order) -> OrderAnswer:
        try:
            async with session.request(
                order.method,
                self.address.url + CONTROL_PREFIX + order.path,
                json=order.document,
                headers={"Authorization": f"Bearer {self.address.token}"},
            ) as reply:
                return OrderAnswer(reply.status, await reply.text())
        except Exception as error:
            log.exception("%s %s failed", order.method, order.path)
            told = {"error": {"message": f"the leader could not carry it out: {error!r}"}}
            return OrderAnswer(503, json.dumps(told))
