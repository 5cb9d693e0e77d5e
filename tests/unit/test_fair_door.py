"""Who is let in next, where a few jobs are opened at a time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from batchrun.keys import FairDoor


async def visit(door: FairDoor, owner: str, seen: list[str], go: asyncio.Event) -> None:
    async with door.passed(owner):
        seen.append(owner)
        await go.wait()


async def test_the_first_of_each_owner_goes_before_the_second_of_any() -> None:
    door, seen, go = FairDoor(1), list[str](), asyncio.Event()
    owners = ["greedy"] * 4 + ["victim"] * 2
    visits = [asyncio.create_task(visit(door, owner, seen, go)) for owner in owners]
    await asyncio.sleep(0)
    assert seen == ["greedy"]
    go.set()
    await asyncio.gather(*visits)

    assert seen == ["greedy", "greedy", "victim", "greedy", "victim", "greedy"]


async def test_who_leaves_before_his_turn_keeps_nobody_out() -> None:
    door, seen, go = FairDoor(1), list[str](), asyncio.Event()
    first, gone, last = (
        asyncio.create_task(visit(door, owner, seen, go)) for owner in ("a", "b", "c")
    )
    await asyncio.sleep(0)
    gone.cancel()
    go.set()
    await asyncio.gather(first, last)
    with suppress(asyncio.CancelledError):
        await gone

    assert seen == ["a", "c"]
    await asyncio.wait_for(visit(door, "d", seen, go), 120)
