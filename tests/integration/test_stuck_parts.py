"""Parts that live and do nothing: a worker of the gateway, and the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer
from urllib.request import urlopen

import aiohttp
import psutil
import pytest
from aiohttp import web
from deployment_rig import WAIT_S, DeploymentRig
from gateway_rig import running_engine, running_gateway, until, write_upstreams
from openai import APIConnectionError, OpenAI

from benchmarks.crash_account import check_executions, read_commits, read_executions
from benchmarks.deployment import Deployment, free_port, wait_until

HANG_S = 240


async def test_a_stuck_worker_is_ended_and_replaced(tmp_path: Path) -> None:
    upstreams = tmp_path / "upstreams.json"
    async with running_engine() as engine:
        write_upstreams(upstreams, [engine.url])
        async with running_gateway(upstreams, "--workers", "2") as gateway:
            first = set(psutil.Process(gateway.process.pid).children())
            stuck, other = first
            stuck.send_signal(signal.SIGSTOP)
            await until(lambda: not stuck.is_running())
            await until(lambda: len(_workers(gateway.process.pid)) == 2)

            assert other in _workers(gateway.process.pid)
            for _ in range(8):
                async with aiohttp.ClientSession() as session:
                    with suppress(aiohttp.ClientConnectorError):
                        async with session.get(gateway.url + "/healthz") as reply:
                            assert reply.status == 200


def _workers(pid: int) -> set[psutil.Process]:
    """The workers of a gateway that run."""
    children = psutil.Process(pid).children()
    return {each for each in children if each.status() != psutil.STATUS_ZOMBIE}


def lives(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped yet does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_daemon_that_does_not_answer_is_503_in_bounded_time(
    tmp_path: Path, method: str
) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_route(method, "/v1/batches", hang)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    upstreams = tmp_path / "upstreams.json"
    upstreams.write_text(json.dumps({"engines": [], "daemon": {"url": url}}))
    try:
        async with running_gateway(upstreams, "--daemon-head-s=0.3") as gateway:
            call = gateway.session.request(method, gateway.url + "/v1/batches", json={"a": 1})
            async with asyncio.timeout(20), call as reply:
                assert reply.status == 503 and int(reply.headers["Retry-After"]) > 0
    finally:
        await runner.cleanup()


async def test_calls_to_a_daemon_that_does_nothing_are_503_long_before_their_time(
    tmp_path: Path,
) -> None:
    """It takes connections, as the kernel does for a process that is stopped, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        url = f"http://127.0.0.1:{stuck.getsockname()[1]}"
        upstreams = tmp_path / "upstreams.json"
        upstreams.write_text(json.dumps({"engines": [], "daemon": {"url": url}}))
        async with running_gateway(upstreams, f"--daemon-head-s={HANG_S}") as gateway:
            calls = [gateway.session.get(gateway.url + "/v1/files") for _ in range(5)]
            async with asyncio.timeout(HANG_S / 2):
                replies = await asyncio.gather(*calls)
    assert {reply.status for reply in replies} == {503}
    assert all(int(reply.headers["Retry-After"]) > 0 for reply in replies)


@pytest.mark.slow
def test_a_second_up_leaves_the_first_alone_though_the_lock_file_is_gone(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    daemon = rig.pid_of("daemon")
    (rig.home / "store.lock").unlink()
    code, line = rig.refuse("up")

    assert code == 4 and f"in use by process {daemon}" in line
    rig.complete_job(5)
    assert set(rig.ask("down")["stopped"]) == {"daemon", "gateway", "engine 0"}
    assert not lives(daemon)


@pytest.mark.slow
def test_an_up_in_a_terminal_that_gives_up_ends_nothing_that_ran(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    ran = {name: rig.pid_of(name) for name in ("daemon", "gateway", "engine")}

    assert f"in use by process {ran['daemon']}" in up_in_a_terminal(rig)
    assert all(map(lives, ran.values()))
    rig.kill("daemon")
    for path in rig.home.glob("store.db*"):
        path.write_bytes(b"no store" * 1024)
    assert "store.db" in up_in_a_terminal(rig)

    assert [lives(pid) for pid in ran.values()] == [False, True, True]


def up_in_a_terminal(rig: DeploymentRig) -> str:
    """What `batchrun up` says whose standard input is a terminal."""
    ours, terminal = os.openpty()
    rig.wrapper = ("sh", "-c", f'exec "$@" <{os.ttyname(terminal)}', "sh")
    try:
        return rig.refuse("up")[1]
    finally:
        rig.wrapper = ()
        os.close(ours)
        os.close(terminal)


@pytest.mark.nightly
def test_up_beside_a_stopped_daemon_says_so_and_down_ends_it(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    os.kill(rig.pid_of("daemon"), signal.SIGSTOP)
    began_s = time.monotonic()
    code, line = rig.refuse("up", "-d")

    assert code == 4 and "gave no answer within 10 s; `batchrun down` ends it" in line
    assert time.monotonic() - began_s < 60
    assert "gave no answer within 5 s" in rig.ask("status")["stalled"]
    assert "daemon" in rig.ask("down")["stopped"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_workers", "is_worker"),
    [(1, False), (2, True), (2, False)],
    ids=["one", "worker", "parent"],
)
def test_of_a_stuck_worker_the_operator_is_told_and_calls_are_answered_again(
    rig: DeploymentRig, num_workers: int, *, is_worker: bool
) -> None:
    rig.use_fake_engine(gateway_workers=num_workers)
    rig.ask("up", "-d")
    wait_until(lambda: rig.ask("status")["progress"]["gateway_silent_s"] > 0, "a first look")
    gateway = psutil.Process(rig.pid_of("gateway"))
    stuck = gateway.children()[0] if is_worker else gateway
    stuck.send_signal(signal.SIGSTOP)
    told = "replaced_workers" if is_worker else "gateway_restarts"

    def is_told() -> bool:
        return bool(rig.ask("status")["progress"][told] == {"stuck": 1, "ended": 0})

    wait_until(is_told, "the operator to be told", WAIT_S)
    with rig.openai(max_retries=0, timeout=10.0) as client:
        wait_until(lambda: _is_answered(client), "a call to be answered again")

    assert not stuck.is_running() or stuck.status() == psutil.STATUS_ZOMBIE
    said = "workers of the gateway that were" if is_worker else "gateways that were started anew"
    for command in ("status", "doctor"):
        assert said in rig.call(command).stdout
    log = (rig.home / "log" / "daemon.log").read_text()
    assert ("that were stuck" if is_worker else "the gateway gives no answer") in log
    page = urlopen(f"http://127.0.0.1:{rig.port}/metrics").read().decode()
    why = "batchrun_gateway_replaced_workers" if is_worker else "batchrun_gateway_restarts"
    assert f'{why}_total{{why="stuck"}} 1.0' in page


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_calls_outlive_the_parent_of_the_workers_that_answer_them(
    rig: DeploymentRig, sent: signal.Signals
) -> None:
    rig.use_fake_engine("--tokens-per-s=4", gateway_workers=2)
    rig.ask("up", "-d")
    wait_until(lambda: rig.ask("status")["progress"]["gateway_silent_s"] > 0, "a first look")
    first = psutil.Process(rig.pid_of("gateway"))
    why = "stuck" if sent is signal.SIGSTOP else "ended"
    with rig.openai(max_retries=0, timeout=WAIT_S) as client:
        stream = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "a"}], max_tokens=100, stream=True
        )
        next(iter(stream))
        first.send_signal(sent)
        wait_until(
            lambda: rig.ask("status")["progress"]["gateway_restarts"][why] == 1, "another gateway"
        )
        wait_until(lambda: _is_answered(client), "a call to be answered again")
        reasons = [chunk.choices[0].finish_reason for chunk in stream]

    assert reasons[-1] is not None
    assert rig.pid_of("gateway") != first.pid


def test_what_runs_is_kept_up_while_another_engine_starts_on_and_on(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    path = rig.folder / "batchrun.yaml"
    document = json.loads(path.read_text())
    document["engines"].append({"name": "slow", "command": ["sleep", "1000"], "port": free_port()})
    path.write_text(json.dumps(document))
    rig.ask("up", "-d")
    assert [engine["state"] for engine in rig.ask("status")["engines"]] == ["ready", "starting"]
    before = [rig.pid_of(part) for part in ("gateway", "engine")]
    for pid in before:
        os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        (engine, other), pids = rig.ask("status")["engines"], [rig.pid_of("gateway")]
        with suppress(OSError):
            pids.append(rig.pid_of("engine"))
        is_ready = engine["state"] == "ready" and other["state"] == "starting"
        return is_ready and not set(pids) & set(before)

    wait_until(is_back, "gateway and engine again")
    with rig.openai(timeout=WAIT_S) as client:
        wait_until(lambda: _is_answered(client), "a call to be answered again")


def _is_answered(client: OpenAI) -> bool:
    with suppress(APIConnectionError):
        return bool(client.models.list().data)
    return False


@pytest.mark.nightly
def test_a_daemon_whose_loop_stands_ends_and_its_successor_goes_on(
    rig: DeploymentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop waits for an answer within a write, as it would for a disk that hangs."""
    texts = [f"question {number}" for number in range(400)]
    with Holdup(rig.folder / "holdup") as holdup:
        monkeypatch.setenv("BATCHRUN_FAILPOINTS", f"file.rename.before=ask:{holdup.path}")
        rig.use_fake_engine("--latency-s=0.2", window={"requests": 8})
        job = rig.submit_rows(*texts)
        first = rig.pid_of("daemon")
        rig.wait_for(job, lambda view: view["num_completed"] >= 40)
        holdup.hold(first)
        # Where its engine is no more is told to the gateway in a file.
        rig.kill("engine")
        wait_until(holdup.is_holding.is_set, "the loop to stand", WAIT_S)
        wait_until(lambda: rig.pid_of("daemon") != first, "a successor", WAIT_S)

        assert rig.wait_until_ended(job)["state"] == "completed"
        assert not lives(first)
    log = (rig.home / "log" / "daemon.log").read_text()
    assert "the daemon's loop has stood for 10 s in" in log
    assert "batchrun: the daemon's loop stood for 60 s in" in log
    assert [row["id"] for row in rig.output()] == [f"row-{i}" for i in range(len(texts))]
    assert all(row["response"] for row in rig.output())
    made = read_executions(rig.executions_path), read_commits(Deployment(rig.folder))
    assert list(check_executions(None, *made)) == []


class Holdup:
    """A socket for `BATCHRUN_FAILPOINTS=...=ask:PATH`: who passes goes on at once, but for the
    first pass of a process that is to be held up, which is never answered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_holding = threading.Event()
        self._may_go = threading.Event()
        self._pid = 0
        answer = self._answer

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                answer(self.request)

        self._server = ThreadingUnixStreamServer(str(path), Handler)
        self._server.daemon_threads = True

    def hold(self, pid: int) -> None:
        self._pid = pid

    def _answer(self, connection: socket.socket) -> None:
        _, pid = connection.recv(256).decode().split()
        if int(pid) == self._pid and not self.is_holding.is_set():
            self.is_holding.set()
            self._may_go.wait()

    def __enter__(self) -> Holdup:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._may_go.set()
        self._server.shutdown()
        self._server.server_close()
