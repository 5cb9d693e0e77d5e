"""Bodies on their way to engines: how long one may take to come, and what all have together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from instant_loop import InstantLoop

from batchrun.server.gateway.bodies import (
    MAX_BODY_S,
    MIN_BYTES_PER_S,
    SMALL_BODY_BYTES,
    BodiesInFlight,
    BodyStream,
)
from batchrun.server.gateway.envelope import RefusalError

IDLE_S = 30.0
MIB = 1 << 20


def received(pieces: Iterator[tuple[float, bytes]]) -> tuple[int, float, str]:
    """How many bytes of these pieces come, each after so many seconds, for how long they are
    waited for, and why no longer."""
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(_receive(pieces))


async def _receive(pieces: Iterator[tuple[float, bytes]]) -> tuple[int, float, str]:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    reader = StreamReader(protocol, 2**30, loop=loop)
    request = make_mocked_request("POST", "/", payload=reader)

    async def send() -> None:
        for pause_s, piece in pieces:
            await asyncio.sleep(pause_s)
            reader.feed_data(piece)
        reader.feed_eof()

    sending = asyncio.create_task(send())
    num_bytes = 0
    try:
        async for piece in BodyStream(request, idle_s=IDLE_S):
            num_bytes += len(piece)
        return num_bytes, loop.time(), ""
    except RefusalError as refusal:
        assert refusal.status == 408
        return num_bytes, loop.time(), refusal.message
    finally:
        sending.cancel()


def test_what_was_sent_fast_holds_nothing_for_later() -> None:
    def burst_and_drip() -> Iterator[tuple[float, bytes]]:
        yield 0.0, bytes(63 * MIB)
        yield from repeat((IDLE_S - 1, b"x"))

    num_bytes, ended_s, why = received(burst_and_drip())

    assert ended_s <= 2 * IDLE_S
    assert num_bytes <= 63 * MIB + 2 and "less than" in why


def test_a_slow_and_steady_caller_comes_through() -> None:
    num_s = MAX_BODY_S - 60
    pieces = repeat((1.0, bytes(MIN_BYTES_PER_S)), num_s)

    assert received(pieces) == (num_s * MIN_BYTES_PER_S, num_s, "")


def test_pauses_between_bursts_are_let_pass() -> None:
    pieces = repeat((IDLE_S - 1, bytes(MIB)), 20)

    assert received(pieces)[::2] == (20 * MIB, "")


def test_no_body_comes_for_ever() -> None:
    num_bytes, ended_s, why = received(repeat((1.0, bytes(MIN_BYTES_PER_S))))

    assert num_bytes > 0 and ended_s == pytest.approx(MAX_BODY_S, abs=2)
    assert why == "the request body did not end within 2 h"


TOTAL_BYTES = 64 * MIB


def test_small_bodies_go_on_where_large_ones_are_refused() -> None:
    bodies = BodiesInFlight(TOTAL_BYTES)
    with ExitStack() as held:
        with pytest.raises(RefusalError) as refused:
            while True:
                held.enter_context(bodies.holding(None)).add(4 * MIB)
        small = held.enter_context(bodies.holding(None))
        small.add(SMALL_BODY_BYTES)
        with pytest.raises(RefusalError):
            small.add(1)
        assert TOTAL_BYTES // 2 < bodies.num_bytes <= TOTAL_BYTES

    assert refused.value.status == 503 and bodies.num_bytes == 0
    assert int(refused.value.response("req_1").headers["Retry-After"]) > 0
    with bodies.holding(None) as alone:
        alone.add(2 * TOTAL_BYTES)


@pytest.mark.parametrize("piece_bytes", [SMALL_BODY_BYTES, 4 * MIB])
def test_no_key_takes_the_room_of_all(piece_bytes: int) -> None:
    bodies = BodiesInFlight(TOTAL_BYTES)
    with ExitStack() as held:
        with pytest.raises(RefusalError, match="of this API key"):
            while True:
                held.enter_context(bodies.holding("key_a")).add(piece_bytes)
        assert bodies.num_bytes <= TOTAL_BYTES // 2
        held.enter_context(bodies.holding("key_b")).add(piece_bytes)


@pytest.mark.parametrize("piece_bytes", [SMALL_BODY_BYTES, 4 * MIB])
def test_bodies_that_may_be_held_for_hours_leave_half_of_the_room(piece_bytes: int) -> None:
    bodies = BodiesInFlight(TOTAL_BYTES)
    with ExitStack() as held:
        with pytest.raises(RefusalError, match="of flex"):
            while True:
                flex = held.enter_context(bodies.holding(None))
                flex.add(piece_bytes)
                flex.count_as_flex()
        assert bodies.flex_bytes <= TOTAL_BYTES // 2
        held.enter_context(bodies.holding(None)).add(piece_bytes)
    assert (bodies.num_bytes, bodies.flex_bytes) == (0, 0)


def test_bodies_that_may_be_held_for_hours_leave_a_key_its_own_room_and_others_theirs() -> None:
    bodies = BodiesInFlight(TOTAL_BYTES)
    with ExitStack() as held:
        for key in ("one", "other"):
            with pytest.raises(RefusalError, match="of flex"):
                while True:
                    flex = held.enter_context(bodies.holding(key))
                    flex.add(SMALL_BODY_BYTES)
                    flex.count_as_flex()
            assert bodies.flex_bytes >= TOTAL_BYTES // 4
        held.enter_context(bodies.holding("one")).add(TOTAL_BYTES // 8)
    assert (bodies.num_bytes, bodies.flex_bytes) == (0, 0)


def test_what_is_announced_is_refused_before_it_is_sent() -> None:
    bodies = BodiesInFlight(TOTAL_BYTES)
    with bodies.holding(None) as first, bodies.holding(None) as second:
        first.add(40 * MIB)
        with pytest.raises(RefusalError):
            second.check(40 * MIB)
        second.check(MIB)
        assert bodies.num_bytes == 40 * MIB
