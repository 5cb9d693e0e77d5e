"""A daemon's fleets that follow what the gateway tells of calls: for real, dry, and without what it
takes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from job_builders import make_tree_job

from batchrun.config import Deployment, load_deployment
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.fleets import SIZE_PREFIX, Fleets
from batchrun.daemon.plugin import profile_path
from batchrun.daemon.prices import speed_of
from batchrun.daemon.supervisor import Supervisor
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.errors import ConfigError, StateError, StoreUnreachableError
from batchrun.estimator.engine_capacity import CallLengths, fleet_capacity
from batchrun.estimator.fits import FittedModel
from batchrun.estimator.profile import CalibrationProfile, EngineIdentity, IdenticalSpread
from batchrun.estimator.step_time import RooflineModel
from batchrun.home import Home
from batchrun.pool.row_queue import Window
from batchrun.server.api.metrics import MetricsPage
from batchrun.server.api.process import Foreground, serve
from batchrun.server.api.replica_follower import ReplicaFollower
from batchrun.server.api.watch import LoopWatch
from batchrun.server.gateway.tally import SeenReply, Tally, create_tally
from batchrun.server.web.calls_of_all import CallsOfAll
from batchrun.server.web.gateway_figures import EngineCalls, GatewayFigures
from batchrun.simulator.calibrate import (
    check_nothing_runs,
    choose_engine,
    make_measured_engine,
)
from batchrun.store.database import Store
from batchrun.store.jobs import list_settings
from batchrun.types import EnginePhase

LAW = RooflineModel(
    base_s=0.003, token_s=7.3e-5, pair_s=2.4e-9, weights_s=0.0114, context_s=9.4e-8, unhidden=0.25
)
MINUTE_S = 60.0


def deployment_of(folder: Path, **replicas: object) -> Deployment:
    """One fleet of 2 to 6 replicas."""
    ray = {"replicas": {"min": 2, "max": 6, **replicas}}
    path = folder / "batchrun.yaml"
    path.write_text(json.dumps({"engines": [{"name": "fleet", "ray": ray}]}))
    return load_deployment(path)


@dataclass(slots=True)
class Followed:
    """A daemon with a fleet whose calls the test makes up, as a gateway would count them."""

    daemon: Daemon
    supervisor: Supervisor
    follower: ReplicaFollower
    figures: GatewayFigures
    tally: Tally
    minute: int = 0

    async def pass_minute(self, num_calls: int) -> dict[str, object]:
        """A minute passes with so many calls; what is said then."""
        reply = SeenReply("", "fleet-0", 0.1, 0.02, 1_000, 0, 100)
        for _ in range(num_calls):
            self.tally.count_reply(reply)
        told = [(each.kind, each.labels, each.values.tolist()) for each in self.tally.read()]
        self.minute += 1
        self.figures.take(json.dumps(told).encode(), MINUTE_S * self.minute)
        await self.follower.look(MINUTE_S * self.minute)
        (fleet,) = self.supervisor.fleets.view()
        advice = fleet["advice"]
        assert isinstance(advice, dict)
        return advice

    @property
    def target(self) -> int:
        return self.supervisor.fleets.target("fleet")

    def metrics(self) -> str:
        page = MetricsPage(self.daemon, LoopWatch(), {}, self.supervisor.fleets)
        return page.render(()).decode()


def follow(store: Store, folder: Path, mode: str) -> Followed:
    """The parts as the daemon's process makes them; nothing is started."""
    deployment, home = deployment_of(folder, follow=mode), Home(folder / "home")
    profile = CalibrationProfile(
        engine=EngineIdentity("tiny", "0.32.0", "cpu", "float32", 16),
        kv_blocks=8_600,
        fitted=(FittedModel(LAW, 0.01, 0.02, 100),),
        spread=IdenticalSpread(0.0, 0, 0),
        pivot_tokens=64,
        online=None,
        measured_at=1.0,
    )
    home.create()
    path = profile_path(deployment, deployment.engines[0], home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
    supervisor = Supervisor(deployment, home, {}, store)
    daemon = Daemon(store, supervisor.slots, folder / "inputs")
    figures = GatewayFigures("http://127.0.0.1:9", "secret")
    calls = CallsOfAll(store, daemon.name, figures)
    follower = ReplicaFollower(deployment, home, daemon, supervisor.fleets, calls)
    supervisor.fleets.resize("fleet", 2, supervisor.slots, 0.0)
    return Followed(daemon, supervisor, follower, figures, Tally(create_tally(1), 1, 0))


async def test_a_fleet_grows_with_its_calls_and_waits_before_it_shrinks(
    store: Store, tmp_path: Path
) -> None:
    followed = follow(store, tmp_path, "on")
    try:
        first = await followed.pass_minute(0)
        assert (first["cause"], followed.target) == ("unknown", 2)
        few = await followed.pass_minute(60)
        assert (few["cause"], followed.target) == ("min", 2)
        more = [await followed.pass_minute(1_000) for _ in range(3)][-1]
        assert more["cause"] == "calls"
        assert 2 < followed.target < 6
        many = await followed.pass_minute(9_000)
        assert (many["cause"], followed.target) == ("max", 6)
        assert str(many["says"]).startswith("follows its calls: 6, which is max: calls fill")
        quiet = [await followed.pass_minute(60) for _ in range(4)][-1]
        assert (quiet["cause"], followed.target) == ("patience", 6)
        text = followed.metrics()
        assert 'batchrun_fleet_advised_replicas{cause="patience",fleet="fleet"} 6.0' in text
        assert 'batchrun_fleet_replicas{fleet="fleet",state="wanted"} 6.0' in text
        assert 'batchrun_fleet_forecast_engines{fleet="fleet",forecast="high"}' in text
    finally:
        await followed.supervisor.close()


async def test_a_fleet_grows_while_the_store_takes_nothing_and_its_number_is_kept_later(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    followed = follow(store, tmp_path, "on")

    def refuse(*_: object) -> None:
        raise StoreUnreachableError("the database does not answer")

    try:
        for num_calls in (0, 60):
            await followed.pass_minute(num_calls)
        with monkeypatch.context() as patches:
            patches.setattr(Store, "write", refuse)
            said = [await followed.pass_minute(9_000) for _ in range(4)]
        assert followed.target == 6
        assert all(str(each["says"]).startswith("follows its calls: 6") for each in said)
        lines = [each.message for each in caplog.records if each.levelname == "ERROR"]
        assert set(lines) == {
            "fleet fleet: whoever leads next would not know that it is to have 6 replicas: "
            "the database does not answer; it is written again in a minute"
        }
        assert list_settings(store, SIZE_PREFIX) == {"fleet": 2}
        await followed.pass_minute(9_000)
        assert list_settings(store, SIZE_PREFIX) == {"fleet": 6}
    finally:
        await followed.supervisor.close()


async def test_replicas_stay_for_rows_in_flight_and_for_answers_that_turn_out_long(
    store: Store, tmp_path: Path
) -> None:
    followed = follow(store, tmp_path, "on")
    job = make_tree_job("due", ["a"] * 1_500)
    job.record = replace(job.record, expires_at=time.time() + 400)
    followed.daemon.active[1] = job
    try:
        first = [await followed.pass_minute(60) for _ in range(2)][-1]
        assert (first["for_jobs"], followed.target) == (2, 2)
        for number in range(64):
            job.answers.sent(number)
            job.answers.ended(number, 8_000)
        long = await followed.pass_minute(60)
        assert (long["cause"], followed.target) == ("deadline", long["for_jobs"])
        assert followed.target > 2
        rows = []
        while (row := job.queue.peek(0.0)) is not None:
            job.queue.take(row)
            rows.append(row)
        assert len(rows) == 1_500
        assert (await followed.pass_minute(60))["for_jobs"] == followed.target
        for row in rows:
            job.queue.finish(row)
        assert (await followed.pass_minute(60))["cause"] == "patience"
        job.queue.check()
    finally:
        await followed.supervisor.close()


async def test_for_a_job_that_is_due_before_a_replica_could_be_there_none_is_bought(
    store: Store, tmp_path: Path
) -> None:
    followed = follow(store, tmp_path, "on")
    job = make_tree_job("due", ["a"] * 15_000)
    job.record = replace(job.record, expires_at=time.time() + 170)
    followed.daemon.active[1] = job
    try:
        said = [await followed.pass_minute(60) for _ in range(2)][-1]
        assert (said["for_jobs"], said["cause"]) == (0, "min")
    finally:
        await followed.supervisor.close()


async def test_figures_have_no_eta_while_offline_work_is_off(store: Store, tmp_path: Path) -> None:
    followed = follow(store, tmp_path, "on")
    dispatcher = followed.daemon.dispatcher
    dispatcher.assigner.join(make_tree_job("due", ["a"] * 1_500), deadline_at=None)
    for _ in range(600):
        dispatcher.assigner.turns._pools[0].capacity.completions.add(1.0, 1_000.0)
    try:
        assert "batchrun_job_eta_seconds{" in followed.metrics()
        dispatcher.is_offline_on = False
        assert "batchrun_job_eta_seconds{" not in followed.metrics()
    finally:
        await followed.supervisor.close()


async def test_engines_outside_a_fleet_do_their_part_of_a_job(store: Store, tmp_path: Path) -> None:
    followed = follow(store, tmp_path, "on")
    (fleet,) = followed.follower._followed
    outside = AttachedEngine(AttachedSettings(name="one", url="http://127.0.0.1:9"))
    outside.state = EnginePhase.READY
    try:
        assert followed.follower._part(fleet, "tiny") == 1.0
        slot = Slot(outside, uses_priority=False, window=Window(16, 10**6), models=("tiny",))
        slot.load.first_speed = 2 * speed_of(fleet.prices)
        followed.daemon.slots = [*followed.daemon.slots, slot]
        assert followed.follower._part(fleet, "tiny") == pytest.approx(0.5), "two of two wanted"
        assert followed.follower._part(fleet, "large") == 1.0
    finally:
        await followed.supervisor.close()


async def test_a_decision_of_long_ago_is_not_said_any_more(store: Store, tmp_path: Path) -> None:
    followed = follow(store, tmp_path, "on")
    try:
        for _ in range(2):
            await followed.pass_minute(60)
        assert "batchrun_fleet_advised_replicas{" in followed.metrics()
        for minute in (4, 5, 6):  # No gateway tells anything.
            await followed.follower.look(MINUTE_S * minute)
        (fleet,) = followed.supervisor.fleets.view()
        assert "its number stays: nothing is heard of calls since" in str(fleet["advice"])
        assert "batchrun_fleet_advised_replicas{" not in followed.metrics()
        assert (await followed.pass_minute(60))["cause"] == "min"
    finally:
        await followed.supervisor.close()


async def test_minutes_that_nobody_counted_are_no_quiet_ones(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise StoreUnreachableError("the database does not answer")

    followed = follow(store, tmp_path, "on")
    clock = SimpleNamespace(time=lambda: MINUTE_S * followed.minute)
    monkeypatch.setattr("batchrun.server.web.calls_of_all.time", clock)
    try:
        for num_calls in (0, 9_000, 9_000):
            await followed.pass_minute(num_calls)
        assert followed.target == 6
        with monkeypatch.context() as outage:
            outage.setattr("batchrun.store.jobs.list_settings", gone)
            for _ in range(11):
                await followed.pass_minute(9_000)
        assert followed.target == 6
        said = await followed.pass_minute(9_000)
        assert (said["cause"], followed.target) == ("max", 6)
    finally:
        await followed.supervisor.close()


async def test_dry_only_says_what_it_would_do(store: Store, tmp_path: Path) -> None:
    followed = follow(store, tmp_path, "dry")
    try:
        await followed.pass_minute(0)
        said = await followed.pass_minute(9_000)
        assert (said["replicas"], followed.target) == (6, 2)
        assert str(said["says"]).startswith("dry, would have by its calls: 6, which is max")
        said = [await followed.pass_minute(0) for _ in range(5)][-1]
        assert (said["replicas"], said["cause"], followed.target) == (6, "patience", 2)
    finally:
        await followed.supervisor.close()


async def test_calls_and_what_engines_hold_are_priced_alike(store: Store, tmp_path: Path) -> None:
    followed = follow(store, tmp_path, "dry")
    (fleet,) = followed.follower._followed
    prompts = np.repeat([400, 30_000], [270, 30])
    lengths = CallLengths(prompts, np.zeros_like(prompts), np.where(prompts > 400, 900, 100))
    try:
        await fleet.find_capacity(lengths, 0.0)
        assert fleet.capacity is not None
        totals = [len(lengths), prompts.sum(), 0, lengths.output_tokens.sum()]
        for num in (1, 2):
            counts = EngineCalls("fleet-0", *(int(num * total) for total in totals))
            fleet.take({"fleet-0": counts}, MINUTE_S, are_all_heard=True)
        trial = replace(fleet.trial, lengths=lengths)
        one = fleet_capacity(trial, 1.0, 6)  # Calls a second.
        calls_per_s = len(lengths) / MINUTE_S
        filled = fleet.forecast.loads[-1] / fleet.capacity.work(2)
        assert filled == pytest.approx(calls_per_s / one.work(2))
    finally:
        await followed.supervisor.close()


async def test_calls_of_a_gateway_that_tells_nothing_are_not_gone(
    store: Store, tmp_path: Path
) -> None:
    followed = follow(store, tmp_path, "dry")
    (fleet,) = followed.follower._followed
    try:
        for num, are_all_heard in ((0, True), (900, True), (1_000, False), (1_100, True)):
            counts = EngineCalls("fleet-0", num, 1_000 * num, 0, 100 * num)
            fleet.take({"fleet-0": counts}, MINUTE_S, are_all_heard=are_all_heard)
        first, held, last = fleet.forecast.loads
        assert held == first > 5 * last
    finally:
        await followed.supervisor.close()


async def test_a_fleet_cannot_follow_without_a_profile(store: Store, tmp_path: Path) -> None:
    deployment, home = deployment_of(tmp_path, follow="on"), Home(tmp_path / "home")
    home.create()
    supervisor = Supervisor(deployment, home, {}, store)
    daemon = Daemon(store, supervisor.slots, tmp_path / "inputs")
    calls = CallsOfAll(store, daemon.name, GatewayFigures("http://127.0.0.1:9", "secret"))
    with pytest.raises(ConfigError, match=r"fleet fleet: 'follow' needs a profile"):
        ReplicaFollower(deployment, home, daemon, supervisor.fleets, calls)


def test_a_daemon_that_could_not_follow_as_a_leader_does_not_stand_by(tmp_path: Path) -> None:
    deployment, home = deployment_of(tmp_path, follow="on"), Home(tmp_path / "home")

    with pytest.raises(ConfigError, match=r"fleet fleet: 'follow' needs a profile"):
        serve(lambda: deployment, home, Foreground(lambda: None))
    assert not home.has_store


def test_a_fleets_engine_is_calibrated_where_no_engine_of_this_machine_is(tmp_path: Path) -> None:
    deployment, home = deployment_of(tmp_path, follow="on"), Home(tmp_path / "home")
    (fleet,) = deployment.engines
    own = fleet.model_copy(update={"name": "own", "ray": None})
    both = deployment.model_copy(update={"engines": [fleet, own]})
    assert [choose_engine(both, name) for name in (None, "fleet", "own")] == [1, 0, 1]
    assert choose_engine(deployment, None) == 0

    home.create()
    home.fleet("fleet").write_text("{}")
    with pytest.raises(StateError, match="fleet fleet may have replicas on this machine"):
        check_nothing_runs(deployment, home)
    home.fleet("fleet").unlink()
    check_nothing_runs(deployment, home)
    engine = make_measured_engine(deployment, home, 0, tmp_path / "steps")
    assert engine.settings.model == str(home.models / "tiny")


def test_a_profile_is_for_the_daemon_and_no_replica_is_told_of_it(tmp_path: Path) -> None:
    ray = {"replicas": {"min": 2, "max": 6}}
    engine = {"name": "fleet", "ray": ray, "profile": "profile.json"}
    path = tmp_path / "batchrun.yaml"
    digests = []
    for described in (engine, {"name": "fleet", "ray": ray}):
        path.write_text(json.dumps({"engines": [described]}))
        home = Home(tmp_path / "home")
        home.create()
        ((fleet, _),) = Fleets(load_deployment(path), home)._fleets.values()
        fleet.want(["fleet-0"])
        digests.append([each.digest for each in fleet.order.replicas])

    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("replicas", "line"),
    [
        ({"follow": "dry", "max": 2}, "follow needs a max above min"),
        ({"offline_min": 7}, "offline_min must be 6 at most"),
        ({"follow": "maybe"}, "follow"),
    ],
)
def test_what_cannot_be_followed_is_said_in_one_line(
    tmp_path: Path, replicas: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment_of(tmp_path, **replicas)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_followed_unless_it_is_asked_for(tmp_path: Path) -> None:
    (engine,) = deployment_of(tmp_path).engines
    assert engine.ray is not None
    assert engine.ray.replicas.follow == "off"
