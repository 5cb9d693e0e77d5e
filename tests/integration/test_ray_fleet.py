"""Fleets on a real Ray of two nodes: where replicas come up, and what becomes of rows and calls
when any of the processes around them is killed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from engine_builders import REAL_ARGS
from kill_rig import Outage, begun_at, check_account, committed_at, wait_for_rows, wait_until
from raw_http import RawHttp
from ray_rig import NODES, FleetRig, RayCluster, kill_9
from ruamel.yaml import YAML

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

CLUSTER_FILE = Path(__file__).parents[2] / "deploy" / "ray" / "cluster.yaml"
NUM_ROWS = 600
WINDOW = 4
"""Rows in an engine at a time, of a second each: the job outlasts what is killed."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    made = RayCluster(tmp_path_factory.mktemp("ray"))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def rig(tmp_path: Path, cluster: RayCluster) -> Iterator[FleetRig]:
    made = FleetRig(tmp_path, cluster)
    yield made
    made.close()
    wait_until(lambda: made.engines() == [])


def start(rig: FleetRig, low: int = 2, high: int = 2, num_rows: int = NUM_ROWS) -> str:
    """Bring a fleet up and submit a job."""
    rig.use_fleet(low, high, "--latency-s=1", window={"requests": WINDOW})
    rig.ask("up", "-d")
    rig.wait_until_placed(low)
    return rig.submit_rows(*(f"question {i}" for i in range(num_rows)))


def say(rig: FleetRig, text: str) -> str:
    """A call, which must be answered."""
    with rig.openai(max_retries=0) as client:
        made = client.completions.create(model="fake", prompt=text, max_tokens=4)
    return made.choices[0].text


def kill_part(rig: FleetRig, job: str, what: str, name: str) -> Outage:
    """`kill -9` what hosts a replica, and wait until there is one again, and one only."""
    process, engine = rig.part(what, name), rig.part("engine", name)
    began_at, num_committed = time.time(), len(committed_at(rig, job))
    kill_9([process])
    assert say(rig, f"{what} was killed")
    wait_until(lambda: not engine.is_running())
    rig.wait_until_placed(2)
    return Outage(began_at, time.time(), num_committed)


@pytest.mark.quick
def test_replicas_come_up_on_nodes_of_their_own_and_take_rows_and_calls(rig: FleetRig) -> None:
    job = start(rig, num_rows=40)

    assert sorted(rig.placed().values()) == sorted(NODES)
    assert say(rig, "hello") == say(rig, "hello")
    check_account(rig, job, [])
    environments = [each.environ() for each in rig.engines()]
    assert [name for each in environments for name in each if name.startswith("RAY_")] == []
    assert [each.nice() for each in rig.engines()] == [0, 0]


def test_a_fleet_grows_and_shrinks_and_rows_go_back(rig: FleetRig) -> None:
    job = start(rig, 1, 3)
    page, metrics = (
        RawHttp(rig.port).call("GET", path) for path in ("/dashboard/engines", "/metrics")
    )
    assert page.status == 200 and b"fleet-0" in page.body and b"fleet-1" not in page.body
    assert re.findall(rb'batchrun_engine_up\{engine="(\S+)"\}', metrics.body) == [b"fleet-0"]
    rig.ask("engine", "scale", "fleet", "3")
    rig.wait_until_placed(3)
    wait_for_rows(rig, job, 60)
    began_at, num_committed = time.time(), len(committed_at(rig, job))
    rig.ask("engine", "scale", "fleet", "1")
    rig.wait_until_placed(1)

    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])
    code, line = rig.refuse("engine", "scale", "fleet", "4")
    assert (code, line) == (2, "batchrun: fleet fleet has 1 to 3 replicas (got 4)\n")


def test_calls_end_in_replicas_that_a_lower_maximum_leaves_out(rig: FleetRig) -> None:
    rig.use_fleet(3, 3, "--latency-s=10")
    rig.ask("up", "-d")
    rig.wait_until_placed(3)
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(say, rig, f"call {number}") for number in range(12)]
        wait_until(lambda: len(rig.executions()) == 12)
        rig.use_fleet(1, 1, "--latency-s=10")
        rig.kill("daemon")
        rig.ask("up", "-d")

        assert all(call.result() for call in calls)
    wait_until(lambda: rig.num_running() == 1)
    assert len(rig.executions()) == 12


def test_a_fleet_that_shrinks_gives_up_what_is_not_ready(rig: FleetRig) -> None:
    rig.use_fleet(1, 3)
    rig.ask("up", "-d")
    rig.ask("engine", "scale", "fleet", "3")
    rig.wait_until_placed(3)
    rig.part("agent", "fleet-0").suspend()
    wait_until(lambda: "fleet-0" not in rig.placed())

    rig.ask("engine", "scale", "fleet", "2")
    wait_until(lambda: rig.num_running() == 2)
    assert set(rig.placed()) == {"fleet-1", "fleet-2"}
    before = {each.pid for each in rig.engines()}
    rig.kill("daemon")
    rig.ask("up", "-d")
    assert set(rig.wait_until_placed(2)) == {"fleet-1", "fleet-2"}
    rig.ask("engine", "scale", "fleet", "3")
    assert set(rig.wait_until_placed(3)) == {"fleet-0", "fleet-1", "fleet-2"}
    assert before < {each.pid for each in rig.engines()}


def test_a_leader_that_knows_nothing_of_a_fleet_leaves_it_as_large(rig: FleetRig) -> None:
    rig.use_fleet(1, 3)
    rig.ask("up", "-d")
    rig.ask("engine", "scale", "fleet", "3")
    rig.wait_until_placed(3)
    before = {each.pid for each in rig.engines()}
    rig.kill("daemon")
    (seen,) = (rig.home / "run").glob("fleet-*.json")
    seen.unlink()

    rig.ask("up", "-d")
    wait_until(lambda: rig.picture()["fleets"][0]["replicas"]["ready"] == 3)
    assert rig.picture()["fleets"][0]["replicas"]["wanted"] == 3
    rig.ask("engine", "scale", "fleet", "2")
    wait_until(lambda: rig.num_running() == 2)
    assert {each.pid for each in rig.engines()} < before


@pytest.mark.quick
def test_engines_are_gone_when_down_returns(rig: FleetRig) -> None:
    rig.use_fleet(2, 2)
    rig.ask("up", "-d")
    rig.wait_until_placed(2)
    for engine in rig.engines():
        engine.suspend()  # It ends no sooner than it must.

    rig.ask("down")
    assert rig.engines() == []


def test_actor_agent_and_daemon_are_killed_and_no_row_is_lost(rig: FleetRig) -> None:
    job = start(rig)
    outages = []
    for number, (what, name) in enumerate((("actor", "fleet-0"), ("agent", "fleet-1"))):
        wait_for_rows(rig, job, 30 + 60 * number)
        outages.append(kill_part(rig, job, what, name))
    wait_for_rows(rig, job, 150)
    before = {each.pid for each in rig.engines()}
    began_at, num_committed = time.time(), len(committed_at(rig, job))
    rig.kill("daemon")
    rig.ask("up", "-d")
    outages.append(Outage(began_at, time.time(), num_committed))

    check_account(rig, job, outages)
    assert {each.pid for each in rig.engines()} == before, "the replicas were not adopted"


def test_a_replica_whose_node_dies_moves_and_is_not_doubled(
    rig: FleetRig, cluster: RayCluster
) -> None:
    job = start(rig)
    wait_for_rows(rig, job, 30)
    before = rig.placed()
    began_at, num_committed = time.time(), len(committed_at(rig, job))
    kill_9([cluster.raylet(before["fleet-0"])])

    assert say(rig, "a node was killed")
    wait_until(lambda: rig.placed().get("fleet-0") == before["fleet-1"])
    assert rig.num_running() == 2
    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])
    cluster.start_node(before["fleet-0"])


def test_settings_that_change_reach_one_replica_after_the_other(rig: FleetRig) -> None:
    job = start(rig)
    wait_for_rows(rig, job, 30)
    before = {each.pid for each in rig.engines()}
    began_at, num_committed = time.time(), len(committed_at(rig, job))

    def begin_anew(high: int, latency_s: float) -> None:
        rig.use_fleet(2, high, f"--latency-s={latency_s}", window={"requests": WINDOW})
        rig.kill("daemon")
        rig.ask("up", "-d")

    begin_anew(3, 1)
    wait_for_rows(rig, job, 60)
    assert {each.pid for each in rig.engines()} == before, "a larger maximum ended replicas"
    begin_anew(3, 0.9)

    shown: list[str] = []

    def are_all_new() -> bool:
        assert say(rig, "while settings change") != ""
        shown.append(rig.call("status").stdout)
        engines = {each.pid for each in rig.engines()}
        return len(engines) == 2 and not engines & before

    wait_until(are_all_new)
    rig.wait_until_placed(2)
    assert any("new settings, one at a time, for fleet-1" in text for text in shown)
    assert any("; waits for fleet-0" in text for text in shown)
    wait_until(lambda: "new settings" not in rig.call("status").stdout)
    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])


def test_a_rolling_restart_brings_new_settings_to_replicas(rig: FleetRig) -> None:
    job = start(rig)
    wait_for_rows(rig, job, 30)
    before = {each.pid for each in rig.engines()}
    began_at, num_committed = time.time(), len(committed_at(rig, job))

    rig.use_fleet(2, 2, "--latency-s=0.9", window={"requests": WINDOW})
    told = rig.ask("engine", "restart", "--rolling")["told"]

    assert [line.partition(": ")[2] for line in told][2::3] == ["is ready"] * 2
    assert all("--latency-s=0.9" in each.cmdline() for each in rig.engines())
    assert len(rig.wait_until_placed(2)) == 2
    assert not before & {each.pid for each in rig.engines()}
    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])


def test_a_fleet_that_is_described_no_more_ends(rig: FleetRig) -> None:
    job = start(rig, num_rows=60)
    wait_for_rows(rig, job, 10)
    before = {each.pid for each in rig.engines()}
    began_at, num_committed = time.time(), len(committed_at(rig, job))

    rig.use_fake_engine()
    rig.kill("daemon")
    rig.ask("up", "-d")

    wait_until(lambda: not before & {each.pid for each in rig.engines()})
    wait_until(lambda: not list((rig.home / "run").glob("fleet-*.json")))
    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])


@pytest.mark.nightly
def test_down_ends_actors_that_stand_still_and_their_names_are_free(rig: FleetRig) -> None:
    rig.use_fleet(2, 2)
    rig.ask("up", "-d")
    rig.wait_until_placed(2)
    actor = rig.part("actor", "fleet-0")
    actor.suspend()

    rig.ask("down")
    wait_until(lambda: rig.engines() == [])
    assert not actor.is_running()

    rig.ask("up", "-d")
    rig.wait_until_placed(2)


def test_an_actor_that_has_lost_its_room_gives_its_name_back(
    rig: FleetRig, cluster: RayCluster
) -> None:
    """As where a placer was killed between two steps, or somebody removed a placement group."""
    rig.use_fleet(1, 1)
    rig.ask("up", "-d")
    rig.wait_until_placed(1)
    before = rig.part("actor", "fleet-0")

    cluster.remove_groups()

    wait_until(lambda: not before.is_running())
    rig.wait_until_placed(1)
    assert rig.part("actor", "fleet-0").pid != before.pid


def test_calls_and_rows_go_on_without_the_head_and_placement_pauses(
    rig: FleetRig, cluster: RayCluster
) -> None:
    job = start(rig)
    wait_for_rows(rig, job, 30)
    before = {each.pid for each in rig.engines()}
    cluster.kill_head()

    def trouble() -> str:
        (fleet,) = rig.picture()["fleets"]
        return str(fleet["trouble"] or "")

    wait_until(lambda: "placement pauses" in trouble())
    assert say(rig, "no head")
    rig.kill("daemon")
    began_at, num_committed = time.time(), len(committed_at(rig, job))
    rig.ask("up", "-d")
    outage = Outage(began_at, time.time(), num_committed)
    check_account(rig, job, [outage])
    assert max(map(len, begun_at(rig, job).values())) == 1
    assert {each.pid for each in rig.engines()} == before

    cluster.start_head_again()
    wait_until(lambda: trouble() == "")
    rig.wait_until_placed(2)
    assert {each.pid for each in rig.engines()} == before


@pytest.mark.quick
def test_ray_takes_the_description_of_a_cluster() -> None:
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    cluster = YAML(typ="safe").load(CLUSTER_FILE.read_text("utf-8"))
    jsonschema.validate(cluster, json.loads(schema.read_text("utf-8")))


@pytest.mark.nightly
def test_an_actor_that_stands_still_is_replaced_once_its_engine_is_empty(rig: FleetRig) -> None:
    job = start(rig, num_rows=1_800)
    wait_for_rows(rig, job, 10)
    began_at, num_committed = time.time(), len(committed_at(rig, job))
    actor, other = rig.part("actor", "fleet-0"), rig.part("engine", "fleet-1")
    actor.suspend()

    wait_until(lambda: not actor.is_running())
    rig.wait_until_placed(2)
    assert rig.part("engine", "fleet-1").pid == other.pid
    check_account(rig, job, [Outage(began_at, time.time(), num_committed)])


@pytest.mark.nightly
def test_replicas_without_a_node_get_the_room_that_they_are_to_have_by_now(
    rig: FleetRig, cluster: RayCluster
) -> None:
    rig.use_fleet(2, 2, gpus=1.0)
    rig.ask("up", "-d")
    placed = rig.wait_until_placed(2)
    kill_9([cluster.raylet(placed["fleet-0"])])
    wait_until(lambda: "waits for a node" in json.dumps(rig.picture()["engines"]))

    rig.use_fleet(2, 2)
    rig.kill("daemon")
    rig.ask("up", "-d")
    assert set(rig.wait_until_placed(2).values()) == {placed["fleet-1"]}
    cluster.start_node(placed["fleet-0"])


@pytest.mark.nightly
@pytest.mark.engine
def test_a_real_vllm_comes_back_after_its_actor_was_killed(rig: FleetRig) -> None:
    rig.use_replicas(1, 1, {"vllm_args": list(REAL_ARGS)}, model="tiny")
    rig.ask("up", "-d")
    wait_until(lambda: "fleet-0" in rig.placed())
    job = rig.submit_rows(*(f"question {i}" for i in range(200)))
    wait_for_rows(rig, job, 20)
    engine = rig.part("engine", "fleet-0")
    kill_9([rig.part("actor", "fleet-0")])

    assert rig.wait_until_ended(job)["num_completed"] == 200
    assert [row["error"] for row in rig.output()] == [None] * 200
    assert not engine.is_running()
    (shown,) = rig.picture()["engines"]
    assert shown["telemetry"]["policy"] == "echo"
