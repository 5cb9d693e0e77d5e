"""Fleets without Ray: what batchrun.yaml may say of them, how replicas are described, and an engine
whose agent moves."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_rig import AgentRig, until
from aiohttp import web
from sqlalchemy import create_engine, make_url

from batchrun.config import load_deployment
from batchrun.control.starting import stop_everything
from batchrun.daemon.engine_link import EngineLink, Slot
from batchrun.daemon.fleets import SIZE_PREFIX, Fleets, empty
from batchrun.engine import ray
from batchrun.engine.agent.remote import AgentAddress
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.fleet_messages import (
    FleetOrder,
    FleetReport,
    FleetSettings,
    PlacedReplica,
    ReplicaSpec,
)
from batchrun.engine.replicas import (
    FleetMemory,
    RayFleet,
    ReplicaEngine,
    leave_to_leader,
    read_memory,
)
from batchrun.engine.sockets import EngineSockets
from batchrun.errors import ConfigError, EngineError, InputError
from batchrun.home import Home
from batchrun.pool.row_queue import Window
from batchrun.server.api.standby import reached
from batchrun.store import database
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import Leader, write_setting
from batchrun.types import EnginePhase, Request
from batchrun.wire import Telemetry
from benchmarks.deployment import free_port

RAY = {"replicas": {"min": 2, "max": 3}, "gpus": 1, "cpus": 4}
FLEET = {"name": "fleet", "ray": RAY}
RANGED = {"name": "fleet", "ray": {"replicas": {"min": 2, "max": 16}}}


def write(folder: Path, *engines: object, **more: object) -> Path:
    """A batchrun.yaml with these engines."""
    path = folder / "batchrun.yaml"
    path.write_text(json.dumps({"engines": engines, **more}))
    return path


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ({"ray": {"replicas": {"min": 3, "max": 2}}}, "max must be 3 at least"),
        ({"ray": {"gpus": 0, "cpus": 0}}, "give 'gpus' or 'cpus'"),
        ({"ray": {"gpus": 1.5}}, "more than one of 'gpus' must be a whole number"),
        ({"ray": {}, "attach": "http://127.0.0.1:1"}, "'ray' goes with neither"),
        ({"ray": {}, "port": 8001}, "'port' belongs to an engine that batchrun starts here"),
        ({"ray": {}, "certificate": "x"}, "'certificate' belongs to an engine with 'agent'"),
        ({"ray": {"replicas": {"min": 300}, "port": 65000}}, "port 65000 leaves no room"),
        ({"ray": {"head": "x"}}, "unknown key"),
    ],
)
def test_what_a_fleet_cannot_be_is_said_in_one_line(
    tmp_path: Path, engine: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_deployment(write(tmp_path, engine))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replicas_may_not_have_the_name_of_another_engine(tmp_path: Path) -> None:
    other = {"name": "fleet-2", "attach": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="two engines have the same 'name'"):
        load_deployment(write(tmp_path, FLEET, other))


def test_fleets_of_one_ray_share_no_port(tmp_path: Path) -> None:
    for port in (8100, 8102, 8612, 7588):
        other = {"name": "other", "ray": RAY | {"port": port}}
        with pytest.raises(ConfigError, match=r"fleet other has ports .* give it 'port' 8615"):
            load_deployment(write(tmp_path, FLEET, other))
    for free in ({"port": 8615}, {"port": 8103}, {"address": "10.0.0.2:6379"}):
        load_deployment(write(tmp_path, FLEET, {"name": "other", "ray": RAY | free}))
    with pytest.raises(ConfigError, match="fleet other has ports"):
        load_deployment(tmp_path / "batchrun.yaml", ray_address="10.0.0.1:6379")


def test_the_address_that_is_given_to_up_counts(tmp_path: Path) -> None:
    path = write(tmp_path, FLEET)
    (config,) = load_deployment(path, ray_address="10.0.0.1:6379").engines
    assert config.ray is not None
    assert config.ray.address == "10.0.0.1:6379"
    plain = write(tmp_path, {"name": "a"})
    with pytest.raises(ConfigError, match="no engine has 'ray'"):
        load_deployment(plain, ray_address="10.0.0.1:6379")


def specs_of(folder: Path, path: Path) -> list[ReplicaSpec]:
    """How the replicas of the one fleet are started."""
    fleets = Fleets(load_deployment(path), Home(folder / "home"))
    return [engine.spec for engine in fleets.engines("fleet")]


def test_each_replica_has_ports_of_its_own_and_what_its_engine_needs(tmp_path: Path) -> None:
    command = ["serve", "--port={port}"]
    path = write(tmp_path, FLEET | {"command": command}, policy="bs", store="postgresql://h/d")

    specs = specs_of(tmp_path, path)

    documents = [json.loads(spec.config) for spec in specs]
    assert [spec.port for spec in specs] == [8100, 8101, 8102]
    assert [each["engines"] for each in documents] == [
        [{"name": f"fleet-{n}", "port": port, "command": ["serve", f"--port={port}"]}]
        for n, port in enumerate((8612, 8613, 8614))
    ]
    assert {key for each in documents for key in each} == {"engines", "policy"}
    for spec in specs:
        (tmp_path / "one.json").write_text(spec.config)
        load_deployment(tmp_path / "one.json")


def test_settings_that_change_make_another_replica(tmp_path: Path) -> None:
    before = specs_of(tmp_path, write(tmp_path, FLEET))
    same = specs_of(tmp_path, write(tmp_path, FLEET))
    args = specs_of(tmp_path, write(tmp_path, FLEET | {"vllm_args": ["--max-model-len", "512"]}))

    assert [spec.digest for spec in before] == [spec.digest for spec in same]
    assert len({spec.digest for spec in (*before, *args)}) == 6


def test_a_secret_of_a_fleet_that_is_no_text_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(range(200, 240)))
    (tmp_path / "raw").chmod(0o600)
    with pytest.raises(ConfigError, match="the secret of a fleet must be text") as caught:
        specs_of(tmp_path, write(tmp_path, FLEET | {"secret_file": "raw"}))
    assert "\n" not in str(caught.value)


async def test_a_replica_whose_engine_cannot_start_fails_and_is_tried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the actor that Ray would run, and its agents."""
    monkeypatch.setattr(ray, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("batchrun.engine.replicas.MAX_FAILED_AGENTS", 2)
    monkeypatch.setenv("BATCHRUN_HOME", str(tmp_path / "node"))
    its = {"command": ["false"], "ray": RAY | {"port": free_port()}}
    fleets = Fleets(load_deployment(write(tmp_path, FLEET | its)), Home(tmp_path / "home"))
    engine, placer = fleets.engines("fleet")[0], ray.Placer(None, lambda: True)
    order = FleetOrder("fleet", "auto", "owner", 1, 1, (engine.spec,), leads=True)
    engine.is_wanted = True
    actor = ray.ReplicaActor(msgspec.to_builtins(engine.spec), "owner")

    def look() -> PlacedReplica:
        answers: dict[str, dict[str, Any] | str] = {engine.name: actor.look()}
        return placer._serve(order, engine.spec, answers, {engine.name})

    starting = asyncio.create_task(engine.start())
    try:
        while not starting.done():
            engine.see(look())
            await asyncio.sleep(0.05)
        with pytest.raises(EngineError) as failed:
            await starting
        line = str(failed.value)
        assert "engine fleet-0 ended while starting the process" in line and "\n" not in line
        num_ended = look().num_ended
        while look().num_ended == num_ended:
            engine.see(look())
            assert engine.state is EnginePhase.FAILED and "2 agents in a row" in engine.stage
            await asyncio.sleep(0.05)
        engine.see(msgspec.structs.replace(look(), is_outdated=True))
        assert engine.state is EnginePhase.STARTING
    finally:
        actor.end(0.0)
        await until(lambda: actor.look()["has_ended"])
        await engine.stop()


def test_settings_are_read_again_unless_they_take_another_daemon(tmp_path: Path) -> None:
    fleets = Fleets(load_deployment(write(tmp_path, FLEET)), Home(tmp_path / "home"))
    new = FLEET | {"vllm_args": ["--max-model-len", "512"]}

    assert fleets.reread(load_deployment(write(tmp_path, FLEET))) == {}
    changed = fleets.reread(load_deployment(write(tmp_path, new)))
    assert set(changed) == {"fleet-0", "fleet-1", "fleet-2"}
    assert "512" in changed["fleet-1"].config
    for other in ({"port": 9000}, {"gpus": 2}, {"address": "other:1"}):
        path = write(tmp_path, FLEET | {"ray": RAY | other})
        with pytest.raises(ConfigError, match="takes the daemon's next start"):
            fleets.reread(load_deployment(path))


@pytest.mark.parametrize("changed", ["address", "owner"])
async def test_replicas_that_nobody_would_end_any_more_are_not_forgotten(
    tmp_path: Path, changed: str
) -> None:
    deployment, home = load_deployment(write(tmp_path, FLEET)), Home(tmp_path / "home")
    fleets, seen = Fleets(deployment, home), home.fleet("fleet")
    fleets.start((), lambda: True)
    await asyncio.sleep(0)
    await fleets.close()
    memory = msgspec.structs.replace(read_memory(seen), report=FleetReport(num_there=1))
    seen.write_bytes(msgspec.json.encode(memory))
    Fleets(deployment, home)

    assert memory.settings is not None
    settings = msgspec.structs.replace(memory.settings, **{changed: "other"})
    memory = msgspec.structs.replace(memory, settings=settings)
    seen.write_bytes(msgspec.json.encode(memory))
    with pytest.raises(ConfigError, match="end them with `batchrun down`"):
        Fleets(deployment, home)
    leave_to_leader(seen)
    Fleets(deployment, home)


def test_a_fleet_that_may_be_larger_has_the_replicas_that_it_had(tmp_path: Path) -> None:
    before = specs_of(tmp_path, write(tmp_path, FLEET))
    larger = {**FLEET, "ray": {"replicas": {"min": 1, "max": 9}, "gpus": 1, "cpus": 4}}
    after = specs_of(tmp_path, write(tmp_path, larger))

    assert [spec.digest for spec in before] == [spec.digest for spec in after[:3]]


@pytest.mark.parametrize(
    ("kept", "num_seen", "num_there", "num_ordered", "target"),
    [
        pytest.param(None, 8, 4, 4, 4, id="what this home saw is old"),
        pytest.param(4, 8, 4, 4, 4, id="another daemon was told a number since"),
        pytest.param(8, 4, 4, 8, 8, id="there is no room yet for all"),
        pytest.param(2, 4, 4, 4, 2, id="those too many are emptied first"),
        pytest.param(None, 8, 0, 2, 2, id="Ray has none"),
        pytest.param(99, 0, 4, 16, 16, id="max was lowered"),
        pytest.param(1, 0, 4, 4, 2, id="min was raised"),
    ],
)
async def test_a_leader_has_as_many_replicas_as_were_asked_for_last_or_as_ray_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: int | None,
    num_seen: int,
    num_there: int,
    num_ordered: int,
    target: int,
) -> None:
    names = [f"fleet-{number}" for number in range(16)]

    def report(num_placed: int) -> FleetReport:
        placed = [PlacedReplica(name, "10.0.0.1", is_there=True) for name in names[:num_placed]]
        return FleetReport((), (*placed, *map(PlacedReplica, names[num_placed:])), num_placed)

    deployment = load_deployment(write(tmp_path, RANGED))
    home, settings = Home(tmp_path / "home"), FleetSettings("fleet", "auto", "0", 1, 1)
    home.create()
    home.fleet("fleet").write_bytes(msgspec.json.encode(FleetMemory(settings, report(num_seen))))
    (tmp_path / "told").write_bytes(msgspec.json.encode(report(num_there)) + b"\n")
    placer = tmp_path / "placer"
    placer.write_text(f"#!/bin/sh\ncat '{tmp_path / 'told'}'\nwhile read -r order; do :; done\n")
    placer.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(placer))
    with closing(open_store(tmp_path / "store.db")) as store:
        if kept is not None:
            write_setting(store, f"{SIZE_PREFIX}fleet", kept)
        fleets = Fleets(deployment, home, store)
    ((fleet, _),) = fleets._fleets.values()
    fleets.start((), lambda: True)
    await until(lambda: fleet.order.leads)

    assert [spec.name for spec in fleet.order.replicas] == names[:num_ordered]
    assert fleets.target("fleet") == target
    await fleets.close()


async def test_a_number_that_was_asked_for_is_known_to_whoever_leads_next(tmp_path: Path) -> None:
    deployment = load_deployment(write(tmp_path, RANGED))

    def fleets_of(store: Store, home: str) -> Fleets:
        return Fleets(deployment, Home(tmp_path / home), store)

    with closing(open_store(tmp_path / "store.db")) as store:
        first = fleets_of(store, "a")
        await first.scale("fleet", 5, (), 0.0)
        assert first.target("fleet") == fleets_of(store, "b").target("fleet") == 5
        with pytest.raises(InputError, match="has 2 to 16 replicas"):
            await first.scale("fleet", 17, (), 0.0)
        assert fleets_of(store, "a").target("fleet") == 5
        await first.close()


def test_a_number_that_an_older_batchrun_kept_goes_into_the_store(tmp_path: Path) -> None:
    deployment, home = load_deployment(write(tmp_path, RANGED)), Home(tmp_path / "home")
    home.create()
    memory = FleetMemory(None, FleetReport(), leads=True, num_wanted=8)
    home.fleet("fleet").write_bytes(msgspec.json.encode(memory))
    with closing(open_store(tmp_path / "store.db")) as store:
        assert Fleets(deployment, home, store).target("fleet") == 8
        assert Fleets(deployment, Home(tmp_path / "heir"), store).target("fleet") == 8


def test_time_in_which_the_machine_was_suspended_counts_for_a_leader_and_its_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(database, "SURE_S", 0.2)
    monkeypatch.setattr(ray, "ORDER_LASTS_S", 0.2)
    store, orders = Store(create_engine("sqlite://"), make_url("postgresql://h/d")), ray._Orders()
    orders._latest = FleetOrder("fleet", "auto", "0", 1, 1, (), leads=True)
    store.led_at_s = orders._came_at_s = database.clock_s()
    while any([store.leads_surely, orders.latest.leads]):
        time.sleep(0.05)
    store.led_at_s = orders._came_at_s = database.clock_s() + 60
    assert all([store.leads_surely, orders.latest.leads])
    store.close()


def test_a_fleet_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    fleets = Fleets(load_deployment(write(tmp_path, FLEET)), Home(tmp_path / "home"))
    with pytest.raises(InputError, match="other is no fleet"):
        fleets.resize("other", 1, (), 0)
    with pytest.raises(InputError, match="has 2 to 3 replicas"):
        fleets.resize("fleet", 4, (), 0)


@pytest.mark.parametrize(
    ("name", "is_its"),
    [("fleet-0", True), ("fleet-10", True), ("fleet", False), ("fleet-a-0", False)],
)
def test_a_fleet_knows_the_names_of_its_replicas(name: str, is_its: bool) -> None:  # noqa: FBT001
    order = FleetOrder("fleet", "auto", "0", 1, 1, (), leads=True)
    assert order.owns(name) is is_its


def test_the_file_that_speaks_to_ray_does_not_import_it() -> None:
    code = "import sys, batchrun.engine.ray, batchrun.daemon.fleets; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_an_engine_follows_its_agent_and_rows_that_stayed_behind_run_again(
    tmp_path: Path,
) -> None:
    rigs = [AgentRig(tmp_path / name, "--latency-s=30") for name in ("old", "new")]
    rigs[1].secret_file.write_bytes(rigs[0].secret_file.read_bytes())
    rigs[1].secret = rigs[0].secret
    spec = ReplicaSpec("fake", rigs[0].port, "", "", "")
    engine = ReplicaEngine(
        AgentAddress(name="fake", url="", secret_file=rigs[0].secret_file), spec, lambda: ""
    )
    engine.is_wanted = True
    assert engine.state is EnginePhase.STARTING
    try:
        async with rigs[0].running(), rigs[1].running():
            engine.client.connect()
            engine.see(PlacedReplica("fake", "127.0.0.1"))
            await until(lambda: engine.state is EnginePhase.READY)
            row = Request("job", 0, 0, 0, "/v1/completions", {"model": "fake", "prompt": "x"})
            sent = asyncio.create_task(engine.client.execute(row))
            await until(lambda: rigs[0].num_executions() == 1)
            engine.client.move(rigs[1].url)
            with pytest.raises(EngineError, match="its rows run again"):
                await sent
            await until(lambda: engine.state is EnginePhase.READY)
            assert engine.client.base_url == rigs[1].url
    finally:
        await engine.stop()


def _says(engine: ReplicaEngine, trouble: str) -> bool:
    return trouble in engine.client.trouble


async def test_a_replica_takes_no_other_replicas_agent_for_its_own(tmp_path: Path) -> None:
    rig = AgentRig(tmp_path)
    spec = ReplicaSpec("large-0", rig.port, "", "", "")
    address = AgentAddress(name=spec.name, url="", secret_file=rig.secret_file)
    engines = [ReplicaEngine(address, spec, lambda: "") for _ in range(2)]
    async with rig.running():
        watching = asyncio.create_task(engines[0].client.watch_from_afar())
        engines[1].client.connect()
        for engine in engines:
            engine.see(PlacedReplica("large-0", "127.0.0.1"))
            await until(partial(_says, engine, "engine fake has its port"))
            assert engine.client.state is None
        watching.cancel()
        await asyncio.wait([watching])
        for engine in engines:
            await engine.stop()


async def test_an_engine_whose_agent_does_not_answer_the_daemon_may_have_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.daemon.fleets.OTHERS_LEARN_S", 0.0)
    rig = AgentRig(tmp_path)
    async with rig.running(), rig.connected() as engine:
        slot = Slot(engine, uses_priority=False, window=Window(32, 400_000), models=())
        assert not await empty(slot, 60.0)
        engine.client.move(f"https://127.0.0.1:{free_port()}")
        await until(lambda: engine.client.state is None)
        assert await empty(slot, 5.0)
        monkeypatch.setattr("batchrun.daemon.fleets.UNREADY_S", 3.0)
        assert not await empty(slot, 60.0)


@pytest.mark.parametrize(("num_calls", "may_have_calls"), [(None, True), (0, False), (1, True)])
async def test_an_engine_whose_metrics_tell_no_queue_is_empty_once_its_scheduler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int | None, *, may_have_calls: bool
) -> None:
    for name in ("LOOK_S", "GATEWAYS_LEARN_S"):
        monkeypatch.setattr(f"batchrun.daemon.fleets.{name}", 0.01)

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text="process_start_time_seconds 1.0\n")

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        engine = AttachedEngine(AttachedSettings(name="other", url=url))
        await engine.start()
        slot = Slot(engine, uses_priority=False, window=Window(32, 400_000))
        if num_calls is not None:
            slot.link = EngineLink(EngineSockets(tmp_path / "engine"), "other")
            told = Telemetry("start", 1.0, "echo", 2_048, is_offline_on=True)
            calls = msgspec.structs.replace(told.online, num_running=num_calls)
            slot.link._remember(math.inf, msgspec.structs.replace(told, online=calls))
        assert await empty(slot, 1.0 if may_have_calls else 60.0) is may_have_calls
        await engine.stop()


def test_what_an_earlier_daemon_heard_makes_no_replica_outdated(tmp_path: Path) -> None:
    home, path = Home(tmp_path / "home"), write(tmp_path, FLEET)
    settings = FleetSettings("fleet", "auto", "0", 1, 1)
    report = FleetReport(replicas=(PlacedReplica("fleet-1", "10.0.0.1", is_outdated=True),))
    home.create()
    seen = home.fleet("fleet")
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.write_bytes(msgspec.json.encode(FleetMemory(settings, report)))
    Fleets(load_deployment(path), home)

    fleet = RayFleet(settings, (), seen=seen, log_path=tmp_path / "log")

    assert not fleet.outdated and fleet.with_a_place == {"fleet-1"}


async def test_a_fleet_is_ended_also_from_a_cell_of_a_notebook(tmp_path: Path) -> None:
    """A loop runs there."""
    home, settings = Home(tmp_path), FleetSettings("fleet", "auto", "0", 1, 1)
    home.create()
    seen = home.fleet("fleet")
    seen.write_bytes(msgspec.json.encode(FleetMemory(settings, FleetReport())))

    assert stop_everything(home) == ["fleet fleet"]
    assert not seen.exists()


def test_a_replica_whose_actor_says_nothing_counts_and_ends_no_call(tmp_path: Path) -> None:
    settings = FleetSettings("fleet", "auto", "0", 1, 1)
    told = (PlacedReplica("fleet-0", "10.0.0.1"), PlacedReplica("fleet-1", is_there=True))
    report = FleetReport(replicas=(*told, PlacedReplica("fleet-2")))
    (tmp_path / "seen").write_bytes(msgspec.json.encode(FleetMemory(settings, report)))
    specs = [ReplicaSpec(f"fleet-{number}", 1, "", "", "") for number in range(3)]
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(b"s" * 64)
    secret_file.chmod(0o600)

    fleet = RayFleet(
        settings, specs, seen=tmp_path / "seen", log_path=tmp_path / "log", secret_file=secret_file
    )
    assert fleet.there == {"fleet-0", "fleet-1"}

    emptied = []
    for wanted, name in ((["fleet-0"], ""), (["fleet-0"], "fleet-1"), (["fleet-1"], "")):
        fleet.want(wanted, emptied=name)
        emptied.append(fleet.order.emptied)
    assert emptied == [(), ("fleet-1",), ()]


@pytest.mark.parametrize(
    ("name", "gateway", "is_reached"),
    [
        ("{here}:/a", "http://127.0.0.1:8000", True),
        ("elsewhere:/a", "http://127.0.0.1:8000", False),
        ("elsewhere:/a", "http://localhost:8000", False),
        ("elsewhere:/a", "http://10.0.0.3:8000", True),
        ("elsewhere:/a", "", False),
    ],
)
def test_a_leader_on_loopback_of_another_machine_is_not_reached(
    name: str, gateway: str, *, is_reached: bool
) -> None:
    leader = Leader(name.format(here=socket.gethostname()), 1, gateway)
    assert (reached(leader) is not None) == is_reached
