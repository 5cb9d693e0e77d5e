"""The wire between daemon and engine, over real sockets: `EngineLink` and `EngineChannel`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq
from conftest import FakeEngineFactory
from msgspec.structs import replace
from test_dispatcher_abort import running_daemon, submit_rows

from batchrun.daemon.engine_link import EngineLink, Steering
from batchrun.engine.sockets import EngineSockets
from batchrun.errors import StateError
from batchrun.vllm_plugin.control import Control, EngineChannel, InForce
from batchrun.wire import MAX_JOBS, FeltCalls, Orders, Telemetry, encode

NONCE = "secret"
STARTED = InForce("echo", 512)


class Engine:
    """An engine's end of the wire, without an engine."""

    def __init__(self, path: Path) -> None:
        self.control = Control(STARTED, 32, NONCE)
        self.channel = EngineChannel(path, self.control.receive)

    def taken(self) -> list[Orders]:
        """The orders that have come in since the last call."""
        orders = []
        while (next_orders := self.control.take()) is not None:
            orders.append(next_orders[1])
        return orders


def telemetry(start_id: str = "first") -> Telemetry:
    return Telemetry(start_id, 1.0, STARTED.policy, STARTED.token_budget, is_offline_on=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """In a folder whose name alone is longer than a unix socket's address may be."""
    folder = tmp_path / ("a long home " * 12).strip()
    folder.mkdir(mode=0o700)
    return folder / "engine-0"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    made = Engine(path)
    yield made
    made.channel.close()


@asynccontextmanager
async def running(steering: Steering) -> AsyncIterator[None]:
    task = asyncio.create_task(steering.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def steering_of(path: Path, jobs: list[str], epoch: int = 1) -> tuple[Steering, EngineLink]:
    link = EngineLink(EngineSockets(path), "0")
    return Steering({"0": (link, NONCE)}, epoch, lambda: jobs), link


async def until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; the test's own time limit bounds the wait."""
    while not condition():
        await asyncio.sleep(0.01)


async def test_telemetry_arrives_and_orders_follow_at_once(path: Path, engine: Engine) -> None:
    steering, link = steering_of(path, ["job-a"])
    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        await until(engine.taken)

    assert link.telemetry == telemetry()


async def test_what_callers_feel_reaches_the_engine_at_once(path: Path, engine: Engine) -> None:
    steering, link = steering_of(path, [])

    async def hears(felt: FeltCalls | None) -> None:
        await until(lambda: any(orders.felt == felt for orders in engine.taken()))

    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        await hears(None)
        steering.callers_felt({})
        await hears(FeltCalls())
        steering.callers_felt({"0": FeltCalls(3, 1), "another": FeltCalls(9, 9)})
        await hears(FeltCalls(3, 1))


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
async def test_a_change_is_answered_with_what_is_in_force(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Whatever the clock of the engine's machine says."""
    steering, link = steering_of(path, ["job-a"])
    said = replace(telemetry(), sent_at=time.time() + ahead_s)
    async with running(steering):
        engine.channel.publish(said)
        await until(lambda: link.telemetry)
        answers = await steering.change("bs+e", 64)
        answer, now = answers["0"], link.telemetry
        monkeypatch.setattr("batchrun.daemon.engine_link.LAG_S", 0.0)
        newer = replace(said, sent_at=said.sent_at + 1, policy="bs")
        engine.channel.publish(newer)
        await until(lambda: link.telemetry == newer)

    assert answer is not None and now is not None
    assert (answer.policy, answer.token_budget, answer.error) == ("bs+e", 64, None)
    assert (now.policy, now.token_budget) == ("bs+e", 64)
    (*_, last) = engine.taken()
    assert (last.policy, last.renew, last.forget) == ("bs+e", ("job-a",), ())


async def test_a_refused_change_is_one_line_and_undone(path: Path, engine: Engine) -> None:
    steering, link = steering_of(path, [])
    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        with pytest.raises(StateError, match="engine 0: the token budget can be 32 to 512 here"):
            await steering.change("bs", 4_096)

    assert (steering.policy, steering.token_budget) == (None, None)
    assert engine.control.in_force == STARTED


async def test_a_job_that_ends_is_forgotten_at_once(path: Path, engine: Engine) -> None:
    jobs = ["job-a", "job-b"]
    steering, link = steering_of(path, jobs)
    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        engine.taken()
        jobs.remove("job-b")
        steering.forget("job-b")
        seen: list[Orders] = []
        await until(lambda: _gather(engine, seen) and seen[-1].forget)

    assert (seen[-1].renew, seen[-1].forget) == (("job-a",), ("job-b",))


async def test_orders_of_many_jobs_are_heard_and_say_of_each_that_it_ended(
    path: Path, engine: Engine
) -> None:
    ids = [f"batch_{number:032x}" for number in range(2 * MAX_JOBS)]
    jobs, ended = ids[:MAX_JOBS], ids[MAX_JOBS:]
    steering, link = steering_of(path, jobs)
    for job_id in ended:
        steering.forget(job_id)
    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        for _ in range(3):
            await steering.order_all()
    orders = engine.taken()

    assert {each.renew for each in orders} == {tuple(jobs)}
    assert {job_id for each in orders for job_id in each.forget} == set(ended)


async def test_an_engine_that_starts_again_is_told_everything(path: Path) -> None:
    steering, link = steering_of(path, [])
    async with running(steering):
        first = Engine(path)
        first.channel.publish(telemetry("first"))
        await until(lambda: link.telemetry)
        await steering.change("bs", None)
        await steering.switch(on=False)
        first.channel.close()
        assert await steering.switch(on=False) == set()
        second = Engine(path)
        second.channel.publish(telemetry("second"))
        seen: list[Orders] = []
        await until(lambda: _gather(second, seen))
        second.channel.close()

    assert (seen[0].policy, seen[0].is_offline_on) == ("bs", False)


async def test_a_daemon_that_starts_again_is_heard_and_its_epoch_rules(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.channel.publish(telemetry())
    for epoch in (1, 2):
        steering, link = steering_of(path, [], epoch)
        async with running(steering):
            await until(partial(getattr, link, "telemetry"))
            await until(partial(_obeys, engine, epoch))
    old, old_link = steering_of(path, [], epoch=1)
    async with running(old):
        await until(lambda: old_link.telemetry)
        with pytest.raises(StateError, match="older orders than those in force"):
            await old.change("bs", None)
        # Of another store, say, once nobody else has been heard for long.
        monkeypatch.setattr("batchrun.vllm_plugin.control.LEASE_S", 0.0)
        await old.change("bs", None)


async def test_without_an_engine_a_change_is_one_line(path: Path) -> None:
    steering, _ = steering_of(path, [])
    async with running(steering):
        with pytest.raises(StateError, match="no engine listens"):
            await steering.change("bs", None)
    with pytest.raises(StateError, match="no engine runs batchrun's scheduler"):
        await Steering({}, 1, list).change("bs", None)


async def test_noise_on_the_socket_is_counted_and_the_next_orders_are_obeyed(
    path: Path, engine: Engine
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{_short(path)}.orders")
        for noise in (b"", b"noise", b"x" * 60_000, encode(Orders("guess", 1, 1))):
            socket.send(noise)
        await until(lambda: engine.control.num_malformed == 4)
    steering, link = steering_of(path, [])
    async with running(steering):
        engine.channel.publish(telemetry())
        await until(lambda: link.telemetry)
        assert (await steering.change("bs", None))["0"] is not None


async def test_a_message_beyond_the_limit_is_not_read(path: Path, engine: Engine) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{_short(path)}.orders")
        socket.send(b"x" * 200_000)
        await asyncio.sleep(0.3)

    assert engine.control.num_malformed == 0


@pytest.mark.parametrize("sit_out_s", [60.0, 0.5])
async def test_rows_in_an_engine_that_obeys_stay_there_for_a_while(
    path: Path,
    engine: Engine,
    fake_engine: FakeEngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    sit_out_s: float,
) -> None:
    monkeypatch.setattr("batchrun.daemon.daemon.SIT_OUT_S", sit_out_s)
    monkeypatch.setattr("batchrun.daemon.engine_link.ANSWER_WAIT_S", 30.0)
    served = await fake_engine("--latency-s=8")
    link = EngineLink(EngineSockets(path), "fake")
    slot_options = {"hint_nonce": NONCE, "link": link}
    engine.channel.publish(telemetry())
    async with running_daemon(path.parent.parent, served.base_url, **slot_options) as daemon:
        await until(lambda: link.telemetry and engine.taken())
        record = await submit_rows(daemon, path.parent.parent, 8)
        await until(lambda: record.seq in daemon.active)
        job = daemon.active[record.seq]
        await until(lambda: job.queue.num_in_flight == 8)

        await daemon.switch_offline(on=False)
        assert engine.control.in_force.is_offline_on is False
        assert sit_out_s < 1 or job.queue.num_in_flight == 8
        await until(lambda: job.queue.num_in_flight == 0)
        if sit_out_s > 1:
            await daemon.switch_offline(on=True)
            await until(lambda: job.counts.num_completed == 8)


def test_the_sockets_are_for_their_owner_and_gone_afterwards(path: Path) -> None:
    engine = Engine(path)
    sockets = sorted(path.parent.iterdir())
    assert [item.name for item in sockets] == ["engine-0.orders", "engine-0.telemetry"]
    assert {item.stat().st_mode & 0o777 for item in sockets} == {0o600}
    engine.channel.close()
    assert list(path.parent.iterdir()) == []


def _gather(engine: Engine, seen: list[Orders]) -> list[Orders]:
    seen += engine.taken()
    return seen


def _obeys(engine: Engine, epoch: int) -> bool:
    return engine.control._newest[0] == epoch


def _short(path: Path) -> str:
    """The same path, short enough for a socket."""
    link = path.parent.parent / "s"
    if not link.exists():
        link.symlink_to(path.parent)
    return str(link / path.name)
