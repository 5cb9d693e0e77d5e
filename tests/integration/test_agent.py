"""An engine's agent and a daemon's end of it, over real sockets with the fake engine."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from agent_rig import AgentRig, inherited, until, write_certificate
from engine_builders import make_request, script_option
from multidict import CIMultiDict
from test_engine_link import Engine, telemetry

from batchrun.daemon.engine_link import EngineLink, Slot, Steering
from batchrun.engine.agent import messages, server
from batchrun.engine.agent.engine import AgentEngine, AgentWire
from batchrun.engine.agent.guard import Guard
from batchrun.engine.agent.messages import Leadership
from batchrun.engine.agent.remote import AgentAddress
from batchrun.engine.command import ManagedSettings
from batchrun.engine.process import find_family, kill_alone, read_record
from batchrun.errors import EngineError
from batchrun.home import NO_ENGINE_HEADER
from batchrun.media.connections import open_session
from batchrun.mutual_tls import client_context
from batchrun.pool.row_queue import Window
from batchrun.server.gateway.balancer import Balancer
from batchrun.server.gateway.forward import ForwardedCall, Forwarder
from batchrun.server.gateway.shared_book import FAILURES, SharedBook, create
from batchrun.server.gateway.upstreams import Upstream
from batchrun.types import EnginePhase, Outcome, OutcomeKind
from batchrun.wire import Orders


@pytest.fixture
def rig(tmp_path: Path) -> AgentRig:
    return AgentRig(tmp_path)


async def test_rows_go_to_the_engine_and_their_outcomes_come_back(rig: AgentRig) -> None:
    async with rig.running(), rig.connected() as engine:
        outcomes = await asyncio.gather(
            *(engine.client.execute(make_request(row=row)) for row in range(300))
        )

        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.OK}
        assert [outcome.row for outcome in outcomes] == list(range(300))
        assert rig.num_executions() == 300
        assert engine.direct_url == rig.engine_settings.base_url
        assert await engine.client.models() == ("fake",)
        assert await engine.client.kv_config() is not None


async def test_rows_end_while_no_daemon_is_there_and_run_once(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path, "--latency-s=0.3")
    async with rig.running():
        async with rig.connected() as first:
            sent = [
                asyncio.create_task(first.client.execute(make_request(row=row))) for row in range(9)
            ]
            await until(lambda: rig.num_executions() == 9)
            first.client.leave()
            for task in sent:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
        async with rig.connected() as second:
            client = second.client
            assert await inherited(client) == set(range(9))
            claimed = [client.claim(("job", row), "") for row in range(9)]
            outcomes = await asyncio.gather(*claimed)
            assert {outcome.kind for outcome in outcomes} == {OutcomeKind.OK}
            again = await client.execute(make_request(row=3))
            assert again.body == outcomes[3].body
            client.committed([("job", row) for row in range(9)])
            await client.execute(make_request(row=10))
        async with rig.connected() as third:
            assert await inherited(third.client) <= {10}
    assert rig.num_executions() == 10


async def test_an_agent_says_again_what_has_not_changed(rig: AgentRig) -> None:
    """A ping waits behind a large frame: what comes from the other end tells that it is there."""
    async with rig.running(), rig.connected() as engine:
        told = engine.client.state
        await until(lambda: engine.client.state is not told and engine.client.state == told)


async def test_outcomes_outlive_the_agent_once_they_are_kept(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    async with rig.running(), rig.connected() as engine:
        await engine.client.execute(make_request(row=5))
    async with rig.running(), rig.connected() as engine:
        assert await inherited(engine.client) == {5}
        assert (await engine.client.claim(("job", 5), "")).kind is OutcomeKind.OK
    assert rig.num_executions() == 1


@pytest.mark.parametrize("stores", [("own A", "own B"), ("7/1", "7/2"), ("own A", "7/1")])
async def test_a_daemon_of_another_store_waits_until_the_first_has_gone(
    rig: AgentRig, stores: tuple[str, str]
) -> None:
    def client_of(store: str, term: int) -> AgentEngine:
        engine = AgentEngine(AgentAddress(name="a", url=rig.url, secret_file=rig.secret_file))
        engine.client.leadership = Leadership(store, term)
        return engine

    one, another = stores
    first, other, heir = client_of(one, 1), client_of(another, 7), client_of(one, 2)
    async with rig.running():
        await first.start()
        other.client.connect()
        await until(lambda: "another store" in other.client.trouble)
        assert first.client.state is not None
        await heir.start()
        await until(lambda: first.client.state is None)
        await first.stop()
        await heir.stop()
        await until(lambda: other.client.state is not None)
        await other.stop()


async def test_a_former_leader_does_not_come_back_when_its_heir_has_gone(rig: AgentRig) -> None:
    def client_of(term: int) -> AgentEngine:
        engine = AgentEngine(AgentAddress(name="a", url=rig.url, secret_file=rig.secret_file))
        engine.client.leadership = Leadership("postgresql://h/d", term)
        return engine

    former, heir, again = client_of(1), client_of(2), client_of(2)
    async with rig.running():
        await heir.start()
        await heir.stop()
        former.client.connect()
        await until(lambda: "led since" in former.client.trouble)
        assert former.client.state is None
        await again.start()
        assert again.client.state is not None
        await again.stop()
        await former.stop()


async def test_a_renewed_certificate_is_shown_without_a_restart(
    rig: AgentRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_CHECK_S", 0.05)
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    shown = write_certificate(old, "127.0.0.1")
    renewed = write_certificate(new, "127.0.0.1")
    trusted = tmp_path / "renewed.pem"
    trusted.write_bytes(renewed[0].read_bytes())
    address = AgentAddress(name="a", url=rig.url, secret_file=rig.secret_file, certificate=trusted)
    engine = AgentEngine(address)
    async with rig.running(*shown):
        engine.client.connect()
        await until(lambda: engine.client.trouble not in {"", "connecting"})
        for before, after in zip(shown, renewed, strict=True):
            after.replace(before)
        await until(lambda: engine.client.state is not None)
        await engine.stop()


async def test_a_daemon_believes_a_renewed_certificate_and_the_old_one_no_more(
    rig: AgentRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("batchrun.engine.agent.remote.LONGEST_RETRY_S", 0.05)
    monkeypatch.setattr("batchrun.engine.agent.remote.LOOK_S", 0.05)
    shown = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        shown.append(write_certificate(tmp_path / name, "127.0.0.1"))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(shown[0][0].read_bytes())
    address = AgentAddress(name="a", url=rig.url, secret_file=rig.secret_file, certificate=trusted)
    follower, looker = AgentEngine(address).client, AgentEngine(address).client
    looking = asyncio.create_task(looker.watch_from_afar())
    follower.connect()
    clients = follower, looker
    async with rig.running(*shown[0]):
        await until(lambda: all(client.state for client in clients))
    async with rig.running(*shown[1]):
        await until(lambda: all("certificate" in each.trouble for each in clients))
        assert follower.trouble.endswith("; see `certificate`")
        trusted.write_text("half a certifi")
        await until(lambda: caplog.text.count("what was believed before still is") == 2)
        with monkeypatch.context() as full:
            full.setattr(os, "memfd_create", _find_no_descriptor)
            trusted.write_bytes(shown[1][0].read_bytes())
            await until(lambda: caplog.text.count("Too many open files; what was believed") >= 2)
        await until(lambda: all(client.state for client in clients))
    async with rig.running(*shown[0]):
        await until(lambda: all("certificate" in each.trouble for each in clients))
    looking.cancel()
    await asyncio.wait([looking])
    await asyncio.gather(*(client.close() for client in clients))


def _find_no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_row_of_another_content_is_another_row(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    old, new = (replace(make_request(row=5), content=content) for content in ("old", "new"))
    async with rig.running():
        async with rig.connected() as engine:
            assert (await engine.client.execute(old)).content == "old"
        async with rig.connected() as engine:
            await inherited(engine.client)
            assert engine.client.inherited["job"] == {5: "old"}
            assert (await engine.client.execute(new)).content == "new"
            assert (await engine.client.execute(new)).content == "new"
    assert rig.num_executions() == 2


async def test_an_outcome_of_what_the_row_was_before_is_not_its_own(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path, "--latency-s=0.5")
    late = Outcome("job", 5, 1, OutcomeKind.OK, body=b"{}", content="old")
    async with rig.running(), rig.connected() as engine:
        sent = asyncio.create_task(
            engine.client.execute(replace(make_request(row=5), content="new"))
        )
        await until(lambda: rig.num_executions() == 1)
        engine.client._hear(messages.encode(messages.EndedRows((late,))))

        assert (await sent).content == "new"
    assert rig.num_executions() == 1


async def test_rows_that_are_taken_back_before_they_went_never_go(rig: AgentRig) -> None:
    async with rig.running(), rig.connected() as engine:
        sent = [
            asyncio.create_task(engine.client.execute(make_request(row=row))) for row in range(5)
        ]
        await asyncio.sleep(0)
        for task in sent[1:]:
            task.cancel()
        await asyncio.wait(sent)
        await engine.client.execute(make_request(row=9))
    assert rig.num_executions() == 2


async def test_rows_larger_than_a_frame_go_in_several(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 20_000)
    monkeypatch.setattr(messages, "MAX_BATCH_BYTES", 7_000)
    monkeypatch.setattr(messages, "MAX_ROW_BYTES", 10_000)
    long = [{"role": "user", "content": "x" * 6_000}]
    async with rig.running(), rig.connected() as engine:
        body: dict[str, object] = {"model": "fake", "messages": long}
        outcomes = await asyncio.gather(
            *(engine.client.execute(make_request(body=body, row=row)) for row in range(8))
        )
        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.OK}
        too_long = await engine.client.execute(
            make_request(body={"model": "fake", "messages": long * 2}, row=9)
        )
        assert too_long.error is not None and too_long.error.code == "request_too_large"
    assert rig.num_executions() == 8


async def test_a_row_that_is_taken_back_is_aborted_and_not_kept(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path, "--latency-s=60")
    async with rig.running():
        async with rig.connected() as engine:
            sent = asyncio.create_task(engine.client.execute(make_request(row=1)))
            await until(lambda: rig.num_executions() == 1)
            sent.cancel()
            await asyncio.wait([sent])
            await asyncio.sleep(0.1)
        async with rig.connected() as engine:
            assert await inherited(engine.client) == set()


async def test_a_reply_that_waits_for_room_and_is_not_wanted_any_more_is_not_kept(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.engine.agent.remote.LONG_REPLY_BYTES", 0)
    waits = asyncio.Event()

    @asynccontextmanager
    async def room() -> AsyncIterator[None]:
        waits.set()
        await asyncio.Event().wait()
        yield

    async with rig.running():
        async with rig.connected() as engine:
            sent = asyncio.create_task(engine.client.execute(make_request(row=1), room=room))
            await waits.wait()
            sent.cancel()
            await asyncio.wait([sent])
            await engine.client.execute(make_request(row=2))
        async with rig.connected() as engine:
            assert await inherited(engine.client) == {2}


async def test_rows_of_an_agent_that_died_are_lost_and_the_next_one_takes_rows(
    tmp_path: Path,
) -> None:
    slow = {"match": {"nth": 1}, "action": {"delay_s": 60}, "times": 1}
    rig = AgentRig(tmp_path, script_option(tmp_path, slow))
    async with rig.running(), rig.connected() as engine:
        sent = asyncio.create_task(engine.client.execute(make_request(row=1)))
        await until(lambda: rig.num_executions() == 1)
        engine.client.leave()
    assert sent.done() is False
    sent.cancel()
    async with rig.running(), rig.connected() as engine:
        assert await inherited(engine.client) == set()
        assert (await engine.client.execute(make_request(row=1))).kind is OutcomeKind.OK


async def test_the_daemon_hears_of_an_engine_that_died_before_its_rows_fail(
    tmp_path: Path,
) -> None:
    rig = AgentRig(tmp_path, "--latency-s=60")
    async with rig.running(), rig.connected() as engine:
        sent = asyncio.create_task(engine.client.execute(make_request(row=1)))
        await until(lambda: rig.num_executions() == 1)
        started = engine.started
        record = read_record(rig.engine_settings.record_path)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)

        assert (await sent).kind is OutcomeKind.RETRY
        assert not await engine.client.is_healthy()
        await until(lambda: engine.state is EnginePhase.READY)
        assert engine.started != started


async def test_telemetry_and_orders_go_through_the_agent(rig: AgentRig) -> None:
    async with rig.running(), rig.connected() as engine:
        before = engine.client.hint_nonce
        scheduler = Engine(rig.channel)
        try:
            link = EngineLink(AgentWire(engine.client), "a")
            steering = Steering({"a": (link, "secret")}, 1, lambda: ["job"])
            running = asyncio.create_task(steering.run())
            scheduler.channel.publish(telemetry())
            await until(lambda: link.telemetry is not None)
            orders: list[Orders] = []
            while not orders:
                orders = scheduler.taken()
                await asyncio.sleep(0.01)
            answers = await steering.change("bs+e", 256)
            running.cancel()
            await asyncio.wait([running])
        finally:
            scheduler.channel.close()

        assert orders[0].renew == ("job",)
        answer = answers["a"]
        assert answer is not None and (answer.policy, answer.token_budget) == ("bs+e", 256)
        await until(lambda: engine.client.hint_nonce)
        assert (before, engine.client.hint_nonce) == (None, engine.client.hints_secret)
        assert Slot(engine, True, window=Window(1, 1)).orders_nonce == engine.client.hint_nonce


async def test_an_agent_that_drains_ends_what_it_has_and_takes_nothing_new(rig: AgentRig) -> None:
    async with rig.running(), rig.connected() as engine, open_own(rig) as session:
        await session.post(rig.url + messages.DRAIN)
        await until(lambda: engine.is_draining)
        assert engine.state is EnginePhase.UNREACHABLE
        refused = await engine.client.execute(make_request(row=1))
        assert refused.kind is OutcomeKind.BUSY
        async with session.post(rig.url + "/v1/completions", json={}) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        async with session.get(rig.url + "/health") as reply:
            assert reply.status == 503
        await session.post(rig.url + messages.DRAIN + "?on=false")
        await until(lambda: engine.state is EnginePhase.READY)
        async with session.get(rig.url + messages.STATE) as reply:
            assert (await reply.json())["has_daemon"] is True
        rig.engine_settings.log_path.write_text("one\ntwo\nthree\n")
        async with session.get(rig.url + messages.LOG + "?lines=2") as reply:
            assert await reply.text() == "two\nthree\n"
        async with session.get(rig.url + messages.LOG + "?lines=x") as reply:
            assert reply.status == 400


async def test_whoever_looks_at_an_agent_sees_that_its_engine_is_to_be_emptied(
    rig: AgentRig,
) -> None:
    address = AgentAddress(name="a", url=rig.url, secret_file=rig.secret_file)
    afar, body = AgentEngine(address), {"model": "fake", "prompt": "x", "max_tokens": 1}
    async with rig.running(), open_own(rig) as session:
        watching = asyncio.create_task(afar.client.watch_from_afar())
        async with rig.connected() as engine:
            engine.client.empty(is_on=True)
            await until(lambda: afar.is_draining and engine.is_draining)
            assert (afar.state, engine.state) == (EnginePhase.READY, EnginePhase.READY)
            async with session.post(rig.url + "/v1/completions", json=body) as reply:
                assert reply.status == 200
            engine.client.empty(is_on=False)
            await until(lambda: not afar.is_draining)
            engine.client.empty(is_on=True)
            await until(lambda: afar.is_draining)
        # The daemon that wanted it has gone.
        await until(lambda: not afar.is_draining and afar.state is EnginePhase.READY)
        watching.cancel()
        await afar.stop()


async def test_an_agent_drains_before_it_ends(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path, "--latency-s=3")
    body = {"model": "fake", "prompt": "x", "max_tokens": 4}
    async with rig.running() as agent, rig.connected() as engine, open_own(rig) as session:
        row = asyncio.create_task(engine.client.execute(make_request(row=1)))
        async with session.post(rig.url + "/v1/completions", json=body | {"stream": True}) as call:
            await until(lambda: rig.num_executions() == 2)
            draining = asyncio.create_task(agent.drain(60.0))
            await until(lambda: engine.is_draining)
            async with session.post(rig.url + "/v1/completions", json=body) as refused:
                assert (refused.status, NO_ENGINE_HEADER in refused.headers) == (503, True)
            assert (await call.read()).endswith(b"data: [DONE]\n\n")
        assert (await row).kind is OutcomeKind.OK
        await draining
    record = read_record(rig.engine_settings.record_path)
    assert record is None or not find_family(record)


async def test_what_outlasts_the_drain_ends_with_its_engine(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path, "--latency-s=60")
    async with rig.running() as agent, rig.connected() as engine:
        row = asyncio.create_task(engine.client.execute(make_request(row=1)))
        await until(lambda: rig.num_executions() == 1)
        await agent.drain(1.0)
        assert not row.done()
        row.cancel()


async def test_stop_ends_agent_and_engine(rig: AgentRig) -> None:
    async with rig.running(), open_own(rig) as session:
        await session.post(rig.url + messages.STOP)
        record = read_record(rig.engine_settings.record_path)
        assert record is not None
        await until(lambda: not find_family(record))


async def test_gateways_reach_an_engine_through_its_agent(rig: AgentRig) -> None:
    upstream = Upstream("a", rig.url, secret_file=rig.secret_file)
    stranger = Upstream("b", rig.url, secret_file=rig.folder / "none")
    book = create(1)
    balancer = Balancer(SharedBook(book, 1, 0))
    call = ForwardedCall("GET", "/v1/models", CIMultiDict())
    async with rig.running(), open_session() as session:
        forwarder = Forwarder(balancer, session)
        balancer.replace([upstream])
        async with forwarder.exchange(call) as exchange:
            assert (await exchange.reply.json())["data"][0]["id"] == "fake"
        assert await forwarder.is_any_healthy()
        for _ in range(FAILURES):
            balancer.failed(upstream, now_s=time.monotonic() + 3_600)
        assert not await forwarder.is_any_healthy()
        balancer.replace([stranger])
        with pytest.raises(EngineError):
            async with forwarder.exchange(call):
                pass
    os.close(book)


@pytest.mark.parametrize("trouble", ["drains", "engine is down"])
async def test_a_call_goes_elsewhere_where_an_agent_has_no_engine_for_it(
    rig: AgentRig, shared_fake_engine: ManagedSettings, trouble: str
) -> None:
    rig.engine_settings = replace(rig.engine_settings, backoff_first_s=60.0)
    behind = Upstream("a", rig.url, secret_file=rig.secret_file)
    other = Upstream("b", shared_fake_engine.base_url)
    book = create(1)
    balancer = Balancer(SharedBook(book, 1, 0))
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    headers = CIMultiDict({"Content-Type": "application/json"})
    text = json.dumps(body).encode()
    call = ForwardedCall("POST", "/v1/chat/completions", headers, text)
    async with rig.running(), open_own(rig) as agent, open_session() as session:
        forwarder = Forwarder(balancer, session)
        if trouble == "drains":
            await agent.post(rig.url + messages.DRAIN)
        else:
            kill_alone(rig.engine_settings.record_path)
        balancer.replace([behind, other])
        assert balancer.candidates(balancer.read(text), now_s=0.0) == [behind, other]
        async with forwarder.exchange(call) as exchange:
            assert (exchange.reply.status, exchange.engine) == (200, "b")
        balancer.replace([behind])
        with pytest.raises(EngineError, match="no engine can be reached"):
            async with forwarder.exchange(call):
                pass
    os.close(book)


async def test_an_agent_that_is_away_is_told_in_one_line(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.engine.agent.remote.CONNECT_S", 1.0)
    with pytest.raises(EngineError, match="the agent does not answer: ") as absent:
        async with rig.connected():
            pass
    assert "\n" not in str(absent.value)


async def test_a_wrong_secret_is_told_in_one_line(
    rig: AgentRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.engine.agent.remote.CONNECT_S", 1.0)
    (tmp_path / "other").mkdir()
    other = AgentRig(tmp_path / "other")
    other.url = rig.url
    async with rig.running():
        with pytest.raises(EngineError, match="it does not hold this secret"):
            async with other.connected():
                pass


@pytest.mark.parametrize(
    ("address", "is_secret_right", "trouble"),
    [
        ("10.9.9.9", True, "is not valid for '127.0.0.1'; see `certificate`"),
        ("127.0.0.1", False, "; it may hold another secret"),
    ],
)
async def test_trouble_with_a_certificate_is_told_as_what_it_is(
    rig: AgentRig,
    tmp_path: Path,
    address: str,
    trouble: str,
    *,
    is_secret_right: bool,
) -> None:
    (tmp_path / "other").mkdir()
    secret_file = rig.secret_file if is_secret_right else AgentRig(tmp_path / "other").secret_file
    shown = write_certificate(tmp_path, address)
    at = AgentAddress(name="a", url=rig.url, secret_file=secret_file, certificate=shown[0])
    client = AgentEngine(at).client
    async with rig.running(*shown):
        client.connect()
        await until(lambda: client.trouble not in {"", "connecting"})
        assert client.trouble.endswith(trouble)
        await client.close()


def test_the_guard_ends_an_engine_whose_agent_was_killed(tmp_path: Path) -> None:
    """With a child of the engine in a session of its own, as vLLM's engine core may be."""
    record_path = tmp_path / "engine.json"
    core = (
        "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"
    )
    program = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from batchrun.engine.agent.guard import Guard; from batchrun.engine.process import spawn\n"
        "async def main():\n"
        "    await Guard(Path(sys.argv[1])).start()\n"
        "    spawn([sys.executable, '-c', sys.argv[2]], env=dict(os.environ),\n"
        "        log_path=Path(sys.argv[1] + '.log'), record_path=Path(sys.argv[1]))\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    argv = [sys.executable, "-c", program, str(record_path), core]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == b"ready\n"
        record = read_record(record_path)
        assert record is not None
        wait_until(lambda: len(find_family(record)) == 2)
        agent.kill()
    wait_until(lambda: not find_family(record))
    wait_until(lambda: not record_path.exists())


async def test_a_second_agent_waits_until_the_first_one_is_gone(tmp_path: Path) -> None:
    first, second = Guard(tmp_path / "engine.json"), Guard(tmp_path / "engine.json")
    await first.start()
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(0.5)
    assert not starting.done()
    await first.close()
    await starting
    await second.close()


def open_own(rig: AgentRig) -> aiohttp.ClientSession:
    """A client with the rig's secret."""
    context: ssl.SSLContext = client_context(rig.secret)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))


def wait_until(condition: object) -> None:
    """Wait for something that gives no notice; the test's own time limit bounds the wait."""
    assert callable(condition)
    while not condition():
        time.sleep(0.02)
