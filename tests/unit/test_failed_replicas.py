"""Replicas whose agents end before their engine is ready: when the daemon gives up, which of them a
smaller fleet keeps, and what ends their failure."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from agent_rig import until

from batchrun.config import load_deployment
from batchrun.daemon.supervisor import Supervisor
from batchrun.daemon.writer import cancel_all
from batchrun.engine import ray
from batchrun.engine.engine import AttachedEngine
from batchrun.engine.fleet_messages import PlacedReplica
from batchrun.engine.replicas import MAX_FAILED_AGENTS, ReplicaEngine
from batchrun.errors import EngineError
from batchrun.home import Home
from batchrun.server.api.picture import find_failure
from batchrun.types import EnginePhase
from benchmarks.deployment import free_port


def supervised(folder: Path, *others: object, num_replicas: int = 3) -> Supervisor:
    """The engines of a deployment with a fleet of up to so many replicas; nothing is started."""
    fleet = {"name": "fleet", "ray": {"replicas": {"min": 1, "max": num_replicas}}}
    path, home = folder / "batchrun.yaml", Home(folder / "home")
    path.write_text(json.dumps({"model": "x", "engines": [fleet, *others]}))
    home.create()
    return Supervisor(load_deployment(path), home, {})


def fail(engine: ReplicaEngine) -> None:
    """So many agents of one actor end that the replica has failed."""
    for num_ended in range(MAX_FAILED_AGENTS + 1):
        engine.see(PlacedReplica(engine.name, num_ended=num_ended, last_words="no such model"))
    assert engine.state is EnginePhase.FAILED


def keep(supervisor: Supervisor) -> list[asyncio.Task[None]]:
    """Bring up each engine, as the daemon does."""
    silent = set[str]()
    return [
        asyncio.create_task(supervisor._keep(slot, silent, is_heir=False))
        for slot in supervisor.slots
    ]


async def end(supervisor: Supervisor, keeping: list[asyncio.Task[None]]) -> None:
    """End what a test has begun."""
    await cancel_all(keeping)
    await supervisor.close()


async def test_the_daemon_gives_up_when_all_replicas_that_are_wanted_have_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = supervised(tmp_path)
    fleet, _ = supervisor.fleets._fleets["fleet"]
    fleet.want(["fleet-0", "fleet-1", "fleet-2"])
    keeping = keep(supervisor)
    try:
        for number, wanted in ((2, ["fleet-0", "fleet-1"]), (0, ["fleet-0", "fleet-1"])):
            fail(fleet.engines[number])
            await until(partial(_says, caplog, f"engine fleet-{number}: 5 agents in a row"))
            fleet.want(wanted)
        assert not any(each.done() for each in keeping)
        fail(fleet.engines[1])
        with pytest.raises(EngineError, match="engine fleet-1: 5 agents in a row"):
            await keeping[1]
    finally:
        await end(supervisor, keeping)


async def test_an_engine_elsewhere_that_does_not_answer_keeps_no_daemon_with_failed_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"name": "other", "attach": f"http://127.0.0.1:{free_port()}"}
    supervisor = supervised(tmp_path, other)
    fleet, _ = supervisor.fleets._fleets["fleet"]
    attached = supervisor.slots[-1].engine
    assert isinstance(attached, AttachedEngine)
    attached._settings = replace(attached._settings, start_timeout_s=0.0)
    fleet.want(["fleet-0"])
    keeping = keep(supervisor)
    try:
        await until(partial(_says, caplog, "engine other: nothing answers"))
        assert not any(each.done() for each in keeping)
        fail(fleet.engines[0])
        with pytest.raises(EngineError, match="engine fleet-0: 5 agents in a row"):
            await keeping[0]
    finally:
        await end(supervisor, keeping)


def _says(caplog: pytest.LogCaptureFixture, line: str) -> bool:
    return line in caplog.text


async def test_a_smaller_fleet_gives_up_what_has_failed_before_what_loads(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path)
    fleet, _ = supervisor.fleets._fleets["fleet"]
    supervisor.fleets.resize("fleet", 2, supervisor.slots, 0.0)
    fail(fleet.engines[0])
    supervisor.fleets.resize("fleet", 1, supervisor.slots, 0.0)
    await until(lambda: any(slot.drains for slot in supervisor.slots))
    drained = [slot.engine.name for slot in supervisor.slots if slot.drains]
    assert drained == ["fleet-0"]
    await supervisor.close()


async def test_a_failure_ends_with_what_has_failed(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path)
    fleet, _ = supervisor.fleets._fleets["fleet"]
    engine = fleet.engines[0]
    placing = PlacedReplica(engine.name, stage="Ray looks for room")
    fleet.want([engine.name])
    fail(engine)
    renewing = asyncio.create_task(
        fleet.renew_with(engine.name, msgspec.structs.replace(engine.spec, digest="renewed"))
    )
    await asyncio.sleep(0)
    engine.see(placing)
    assert (engine.state, engine.stage) == (EnginePhase.STARTING, "Ray looks for room")
    fail(engine)
    supervisor.fleets.prepare(engine.name, msgspec.structs.replace(engine.spec, digest="prepared"))
    engine.see(placing)
    assert engine.stage == "Ray looks for room"
    fail(engine)
    fleet.want([engine.name, "fleet-1"])
    assert engine.stage.startswith("5 agents in a row")
    fleet.want(["fleet-1"])
    fleet.want([engine.name])
    engine.see(placing)
    assert find_failure(supervisor.slots, None) is None
    assert (engine.state, engine.stage) == (EnginePhase.STARTING, "Ray looks for room")
    await end(supervisor, [renewing])


async def test_an_actor_whose_agent_runs_counts_no_failure_of_the_one_before(
    tmp_path: Path,
) -> None:
    supervisor = supervised(tmp_path)
    fleet, _ = supervisor.fleets._fleets["fleet"]
    engine = fleet.engines[0]
    fleet.want([engine.name])
    for num_ended in (*range(MAX_FAILED_AGENTS), 0):
        engine.see(PlacedReplica(engine.name, num_ended=num_ended, last_words="no such model"))
        assert engine.state is EnginePhase.STARTING
    engine.see(PlacedReplica(engine.name, num_ended=1, last_words="no such model"))
    assert engine.stage.startswith("5 agents in a row")
    await supervisor.close()


async def test_a_replica_whose_agent_cannot_be_started_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the actor that Ray would run, on a node whose folder cannot be used."""
    monkeypatch.setattr(ray, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("BATCHRUN_HOME", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "agents").write_text("no folder")
    supervisor = supervised(tmp_path)
    fleet, _ = supervisor.fleets._fleets["fleet"]
    engine = fleet.engines[0]
    actor = ray.ReplicaActor(msgspec.to_builtins(engine.spec), "owner")
    try:
        await until(lambda: actor.look()["num_ended"] >= MAX_FAILED_AGENTS)
        assert "cannot be the home (Not a directory)" in actor.look()["last_words"]
    finally:
        actor.end(0.0)
        await until(lambda: actor.look()["has_ended"])
        await supervisor.close()
