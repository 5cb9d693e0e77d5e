"""Fleets without Ray: what batchrun.yaml may say of them, how replicas are described, and an engine
whose agent moves."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from agent_rig import AgentRig, until
from sqlalchemy import create_engine, make_url

from batchrun.config import load_deployment
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.fleets import Fleets, empty
from batchrun.engine import ray
from batchrun.engine.agent.remote import AgentAddress
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
from batchrun.errors import ConfigError, EngineError, InputError
from batchrun.home import Home
from batchrun.pool.row_queue import Window
from batchrun.server.api.standby import reached
from batchrun.store import database
from batchrun.store.database import Store
from batchrun.store.jobs import Leader
from batchrun.types import EnginePhase, Request
from benchmarks.deployment import free_port

RAY = {"replicas": {"min": 2, "max": 3}, "gpus": 1, "cpus": 4}
FLEET = {"name": "fleet", "ray": RAY}


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


async def test_a_fleet_has_the_size_that_was_asked_for_last(tmp_path: Path) -> None:
    path = write(tmp_path, {**FLEET, "ray": {"replicas": {"min": 1, "max": 3}}})

    async def target(resized: int | None, *, leads: bool = True) -> int:
        fleets = Fleets(load_deployment(path), Home(tmp_path / "home"))
        fleets.start((), (lambda: True) if leads else None)
        if resized is not None:
            fleets.resize("fleet", resized, (), 0)
        await asyncio.sleep(0)
        found = fleets.target("fleet")
        await fleets.close()
        return found

    assert await target(None) == 1
    assert await target(3) == 3
    assert await target(None) == 3
    assert await target(2) == 2
    assert await target(None) == 2
    # Another daemon leads now, and may ask for another size.
    await target(None, leads=False)
    assert await target(None) == 1


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


def test_what_an_earlier_daemon_heard_makes_no_replica_outdated(tmp_path: Path) -> None:
    home, path = Home(tmp_path / "home"), write(tmp_path, FLEET)
    settings = FleetSettings("fleet", "auto", "0", 1, 1)
    report = FleetReport(replicas=(PlacedReplica("fleet-1", "10.0.0.1", is_outdated=True),))
    home.create()
    seen = home.fleet("fleet")
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.write_bytes(msgspec.json.encode(FleetMemory(settings, report, 3)))
    Fleets(load_deployment(path), home)

    fleet = RayFleet(settings, (), seen=seen, log_path=tmp_path / "log")

    assert not fleet.outdated and fleet.with_a_place == {"fleet-1"}
    assert fleet.num_wanted == 3


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
