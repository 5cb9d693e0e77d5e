"""Rows come into vLLM's API server a few at a time, in their order; calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import pytest
import pytest_asyncio

from batchrun.engine import door
from batchrun.engine.door import NUM_PLACES, PLACE_BYTES, EngineDoor, Message, Receive


class Server:
    """An application as vLLM's: it renders a prompt when told to, and then submits it. `rendering`
    has the ids of requests that it works on, `running` those that its engine has."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(engine_client=self)
        self.rendering: list[str] = []
        self.running: list[str] = []
        self.bodies: dict[str, bytes] = {}
        self._rendered: dict[str, asyncio.Event] = {}
        self._answered = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, _send: object) -> None:
        name = dict(scope["headers"])[b"x-request-id"].decode()
        self.bodies[name] = b""
        is_whole = False
        while not is_whole:
            message = await receive()
            self.bodies[name] += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        self.rendering.append(name)
        try:
            await self._rendered.setdefault(name, asyncio.Event()).wait()
        finally:
            self.rendering.remove(name)
        # As vLLM does, in a task of its own.
        await asyncio.create_task(self._submit(name))

    async def _submit(self, name: str) -> None:
        async for _ in self.state.engine_client.generate(name):
            pass

    async def generate(self, name: str) -> AsyncIterator[str]:
        self.running.append(name)
        await self._answered.wait()
        yield name

    encode = generate

    async def render(self, *names: str) -> None:
        """These prompts are rendered now."""
        for name in names:
            self._rendered.setdefault(name, asyncio.Event()).set()
        await settled()

    async def answer(self) -> None:
        """The engine answers what it has."""
        self._answered.set()
        await settled()


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


class Caller:
    """Sends requests through a door."""

    def __init__(self, server: Server) -> None:
        self._door, self._server = EngineDoor(server), server
        self.tasks: list[asyncio.Task[None]] = []

    async def send(
        self, *names: str, body: bytes = b"{}", is_whole: bool = True
    ) -> Sequence[asyncio.Task[None]]:
        """`is_whole`: the sender stays until all of the body is sent."""
        sent = [asyncio.create_task(self._send(name, body, is_whole=is_whole)) for name in names]
        self.tasks += sent
        await settled()
        return sent

    async def _send(self, name: str, body: bytes, *, is_whole: bool) -> None:
        parts = [body[: len(body) // 2], body[len(body) // 2 :]]
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages.append({"type": "http.request"} if is_whole else {"type": "http.disconnect"})

        async def receive() -> Message:
            return messages.pop(0)

        async def send(_message: Message) -> None:
            pass

        headers = [(b"x-request-id", name.encode())]
        scope = {"type": "http", "path": "/v1/completions", "headers": headers, "app": self._server}
        await self._door(scope, receive, send)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(door, "LONGEST_S", 3_600.0)
    return Server()


@pytest_asyncio.fixture
async def caller(server: Server) -> AsyncIterator[Caller]:
    made = Caller(server)
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


LONG = b"x" * NUM_PLACES * PLACE_BYTES
ROWS = [f"batchrun-1-job-{number}-1" for number in range(3 * NUM_PLACES)]


async def test_rows_come_as_others_have_reached_the_engine(server: Server, caller: Caller) -> None:
    await caller.send(*ROWS)
    assert server.rendering == ROWS[:NUM_PLACES]

    await server.render(ROWS[1])
    assert server.running == [ROWS[1]]
    assert server.rendering == [ROWS[0], *ROWS[2 : NUM_PLACES + 1]]

    await server.render(*ROWS)
    assert sorted(server.running) == sorted(ROWS) and server.rendering == []
    await server.answer()
    assert all(task.done() for task in caller.tasks)


async def test_a_call_goes_before_the_rows_that_wait(server: Server, caller: Caller) -> None:
    await caller.send(*ROWS)
    await caller.send("call", body=10 * LONG)

    assert server.rendering == [*ROWS[:NUM_PLACES], "call"]
    await server.render("call")
    assert server.running == ["call"] and len(server.rendering) == NUM_PLACES


async def test_a_long_row_takes_all_places(server: Server, caller: Caller) -> None:
    long, short = ROWS[:2], ROWS[2:]
    await caller.send(short[0])
    await caller.send(*long, body=LONG)
    await caller.send(*short[1:])
    assert server.rendering == [short[0]]

    await server.render(short[0])
    assert server.rendering == [long[0]]
    await server.render(*long)
    assert server.rendering == short[1 : 1 + NUM_PLACES]


async def test_rows_that_leave_give_their_places_back(server: Server, caller: Caller) -> None:
    tasks = await caller.send(*ROWS)
    for task in tasks[1 : NUM_PLACES + 2]:
        task.cancel()
    await settled()

    left = [ROWS[0], *ROWS[NUM_PLACES + 2 :]]
    assert server.rendering == left[:NUM_PLACES]
    await server.render(*left)
    assert sorted(server.running) == sorted(left)


async def test_a_row_that_never_reaches_the_engine_keeps_others_waiting_for_a_while(
    server: Server, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "LONGEST_S", 0.01)
    await caller.send(*ROWS)
    while server.rendering != ROWS:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(door, "LONGEST_S", 3_600.0)
    await server.render(*ROWS)
    await caller.send(*[f"{row}-again" for row in ROWS])
    assert len(server.rendering) == NUM_PLACES


async def test_images_count_as_no_text_and_bodies_arrive_whole(
    server: Server, caller: Caller
) -> None:
    image = b'{"url": "data:image/png;base64,' + LONG + b'"}'
    await caller.send(*ROWS, body=image)

    assert server.rendering == ROWS[:NUM_PLACES]
    assert {server.bodies[row] for row in server.rendering} == {image}


async def test_base64_within_a_text_counts_as_text(server: Server, caller: Caller) -> None:
    text = b'{"content": "![a](data:image/png;base64,AAAA) ' + LONG + b'"}'
    html = b'{"content": "<img src=\\"data:image/png;base64,' + LONG + b'\\">"}'
    await caller.send(ROWS[0], body=text)
    await caller.send(ROWS[1], body=html)
    await caller.send(ROWS[2])

    assert server.rendering == ROWS[:1]
    await server.render(ROWS[0])
    assert server.rendering == ROWS[1:2]


async def test_a_row_whose_sender_has_gone_is_not_handed_on(server: Server, caller: Caller) -> None:
    (task,) = await caller.send(ROWS[0], is_whole=False)

    assert task.done() and not server.bodies


async def test_a_server_that_is_not_vllms_gets_all_at_once(server: Server, caller: Caller) -> None:
    del server.state.engine_client
    await caller.send(*ROWS)
    assert server.rendering == ROWS
