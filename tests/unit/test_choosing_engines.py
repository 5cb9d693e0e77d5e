"""Which rows of a job go to which engine, where there are several."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agent_rig import AgentRig, until
from job_builders import make_tree_job

from batchrun.config import Deployment
from batchrun.daemon.daemon import Daemon
from batchrun.daemon.dispatch import Assigner, bring_together
from batchrun.daemon.engine_link import Slot, choose_default
from batchrun.daemon.fleets import Fleets
from batchrun.daemon.in_flight import Assignment
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.prices import speed_of
from batchrun.engine.command import AttachedSettings, ManagedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.errors import InputError
from batchrun.home import Home
from batchrun.pool.row_queue import BOUND_S, RowLoad, Window
from batchrun.routing.engine_book import Prices
from batchrun.server.api.picture import view_engines
from batchrun.server.api.rolling import Rolling
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.store.database import Store, open_store
from batchrun.types import DEFAULT_MODEL, EnginePhase, Usage

LETTERS = "abcdefghijkl"


def make_job(rows_each: int = 6, letters: str = LETTERS) -> ActiveJob:
    """Rows about documents of forty chunks, those of one far apart."""
    texts = [letter * 40 + tail for tail in "xyzuvwrstq"[:rows_each] for letter in letters]
    return make_tree_job("job", texts)


def take(job: ActiveJob, engine: int, loads: dict[int, RowLoad]) -> str | None:
    """Hand a row out; the letter of its document."""
    row = job.queue.peek(0.0, engine, loads)
    if row is None:
        return None
    job.queue.take(row, engine, loads)
    job.queue.check()
    return LETTERS[row % 12]


def loads_of(*speeds: float) -> dict[int, RowLoad]:
    return {engine: RowLoad(speed) for engine, speed in enumerate(speeds)}


def test_engines_pull_groups_and_go_on_with_them() -> None:
    job, loads = make_job(), loads_of(1.0, 1.0, 1.0)
    got: defaultdict[int, str] = defaultdict(str)
    for turn in range(12):
        engine = turn % 3
        got[engine] += take(job, engine, loads) or ""
    assert dict(got) == {0: "aaaa", 1: "bbbb", 2: "cccc"}


def test_an_engine_that_leaves_renumbers_nobody() -> None:
    job, loads = make_job(), loads_of(1.0, 1.0, 1.0)
    taken = {engine: [take(job, engine, loads) for _ in range(2)] for engine in loads}
    del loads[1]
    for engine in loads:
        assert [take(job, engine, loads) for _ in range(4)] == taken[engine] * 2
    assert take(job, 2, loads) == taken[1][0]
    assert take(job, 0, loads) not in [each for letters in taken.values() for each in letters]


def test_rows_that_come_back_go_to_the_engine_of_their_group_or_to_one_together() -> None:
    job, loads = make_job(), loads_of(1.0, 1.0, 1.0)
    rows = []
    for _ in range(3):
        row = job.queue.peek(0.0, 1, loads)
        assert row is not None
        job.queue.take(row, 1, loads)
        rows.append(row)
    take(job, 0, loads)
    for row in rows:
        job.queue.give_back(row)
    assert job.queue.peek(0.0, 1, loads) == rows[0]
    assert job.queue.peek(0.0, 0, loads) not in rows

    del loads[1]
    assert [job.queue.peek(0.0, engine, loads) for engine in loads] == [rows[0]] * 2
    job.queue.take(rows[0], 2, loads)
    assert job.queue.peek(0.0, 2, loads) == rows[1]
    assert job.queue.peek(0.0, 0, loads) not in rows


def test_an_idle_engine_takes_rows_off_the_one_that_would_be_done_last() -> None:
    job, loads = make_job(10, "a"), loads_of(1.0, 1.0)
    assert take(job, 0, loads) is not None
    loads[0].work_s, loads[1].work_s = 0.0, 1.0
    assert take(job, 1, loads) is None
    loads[0].work_s, loads[1].work_s = 100.0, 0.0
    assert take(job, 1, loads) is not None


def test_rows_that_meet_another_job_on_one_engine_do_not_leave_the_others_idle() -> None:
    texts = ["a" * 40 + chr(0x100 + i) * 9 for i in range(200)]
    first, second = (make_tree_job(name, texts) for name in ("first", "second"))
    loads = loads_of(1.0, 1.0, 1.0, 1.0)
    got: defaultdict[int, int] = defaultdict(int)
    for turn in range(400):
        engine = turn % 4
        job, other = [(first, second), (second, first)][turn // 4 % 2]
        row = job.queue.peek(0.0, engine, loads)
        if row is None:
            continue
        job.queue.take(row, engine, loads)
        got[engine] += 1
        bring_together(job, row, [job, other], engine)
        job.queue.check()
        other.queue.check()

    assert sum(got.values()) > 360
    assert min(got.values()) > 80


def test_a_group_that_is_much_of_an_engines_share_is_cut() -> None:
    texts = ["a" * 8 + chr(ord("a") + i % 24) * 9 for i in range(240)]
    job, loads = make_tree_job("job", texts), loads_of(1.0, 1.0, 1.0, 1.0)
    for engine in loads:
        row = job.queue.peek(0.0, engine, loads)
        assert row is not None
        job.queue.take(row, engine, loads)
    for engine in loads:
        assert job.queue.peek(0.0, engine, loads) is not None


def test_rows_go_to_engines_of_their_model() -> None:
    slots = [slot_of("a", "small"), slot_of("b", "large", "adapter"), slot_of("c")]
    slots[2].models = None
    assigner: Assigner[ActiveJob, Slot] = Assigner(slots)
    for name, model in (("one", "adapter"), ("two", "default")):
        job = make_job()
        job.record = replace(job.record, id=name)
        job.spec = job.spec.model_copy(update={"model": model})
        assigner.join(job, deadline_at=None)
    for slot in slots:
        slot.default_model = "small"
    for tick in range(200):
        assigner.assign(tick / 10)

    assert {key[0] for key in slots[0].in_flight} == {"two"}
    assert {key[0] for key in slots[1].in_flight} == {"one"}
    assert not slots[2].in_flight

    slots[2].models = ("adapter",)
    unknown = make_job()
    unknown.record = replace(unknown.record, id="three")
    unknown.spec = unknown.spec.model_copy(update={"model": "x"})
    assigner.join(unknown, deadline_at=None)
    for tick in range(200, 400):
        assigner.assign(tick / 10)
    assert "three" in {key[0] for slot in slots for key in slot.in_flight}


def test_a_row_that_failed_goes_to_another_engine_of_its_model() -> None:
    slots = [slot_of("a", "small"), slot_of("b", "large"), slot_of("c", "small")]
    for slot in slots:
        slot.default_model = "small"
    assigner: Assigner[ActiveJob, Slot] = Assigner(slots)
    job = make_job()
    assigner.join(job, deadline_at=None)
    failed = assigner.assign(0.0)[0][0]
    failed.slot.release(failed)
    assigner.give_back(failed, moves=True)
    job.queue.check()

    again = {sent.row: sent.engine for sent in assigner.assign(1.0)[0]}
    assert {failed.engine, again[failed.row]} == {0, 2}


def test_rows_fail_once_at_a_sick_engine_that_fails_fast() -> None:
    """One of two fails each row after 0.1 s, the other takes four seconds for eight."""
    slots = [slot_of("sick", "small"), slot_of("sound", "small")]
    for slot in slots:
        slot.window.max_waiting, slot.default_model = 8, "small"
    assigner: Assigner[ActiveJob, Slot] = Assigner(slots)
    job = make_job(10)
    assigner.join(job, deadline_at=None)
    in_flight: list[tuple[float, Assignment[ActiveJob, Slot]]] = []
    failed: Counter[int] = Counter()
    for now_s in np.arange(0, 200, 0.2).tolist():
        while assigned := assigner.assign(now_s)[0]:
            in_flight += [(now_s + (0.1, 4.0)[row.engine], row) for row in assigned]
        for ended in [each for each in in_flight if each[0] <= now_s]:
            in_flight.remove(ended)
            row = ended[1]
            row.slot.release(row)
            if row.slot is slots[1]:
                assigner.settle(row, Usage(64, 128))
                job.queue.finish(row.row)
            else:
                failed[row.row] += 1
                assigner.give_back(row, ready_at_s=now_s + 1.0, moves=True)
    job.queue.check()

    assert job.queue.num_unfinished == 0
    assert failed and max(failed.values()) == 1


@pytest.mark.parametrize(
    ("state", "is_refused"), [(EnginePhase.STOPPED, True), (EnginePhase.FAILED, False)]
)
def test_a_replica_that_is_not_wanted_leaves_no_model_open(
    state: EnginePhase, *, is_refused: bool
) -> None:
    slots = [slot_of("a", "small"), slot_of("b")]
    other = slots[1].engine
    assert isinstance(other, AttachedEngine)
    slots[1].models, other.state = None, state
    assigner: Assigner[ActiveJob, Slot] = Assigner(slots)
    job = make_job()
    job.spec = job.spec.model_copy(update={"model": "unknown"})
    assigner.join(job, deadline_at=None)
    assigner.assign(0.0)

    assert bool(slots[0].in_flight) == is_refused


@pytest.mark.parametrize(
    ("state", "expected", "default"),
    [
        (EnginePhase.STARTING, "large", "large"),
        (EnginePhase.FAILED, "large", "large"),
        (EnginePhase.STARTING, None, None),
        (EnginePhase.UNREACHABLE, None, None),
        (EnginePhase.READY, None, None),
        (EnginePhase.FAILED, None, None),
        (EnginePhase.STOPPED, "large", "small"),
    ],
)
def test_the_first_engine_has_the_model_of_rows_that_name_none(
    state: EnginePhase, expected: str | None, default: str | None
) -> None:
    slots = first, second, third = slot_of("a"), slot_of("b", "small"), slot_of("any")
    first.models, first.expected_model = None, expected
    assert isinstance(first.engine, AttachedEngine)
    first.engine.state = state
    choose_default(slots)
    assert [slot.default_model for slot in slots] == [default] * 3
    assert (second.serves(DEFAULT_MODEL), third.serves(DEFAULT_MODEL)) == (
        default == "small",
        default is not None,
    )

    first.engine.state, first.models = EnginePhase.READY, ("told", "adapter")
    choose_default(slots)
    assert [slot.default_model for slot in slots] == ["told"] * 3
    assert first.serves(DEFAULT_MODEL)

    first.models = ()
    first.expected_model = None
    choose_default(slots)
    assert second.serves(DEFAULT_MODEL), "one that does not tell is passed over"


async def test_after_a_restart_rows_that_name_no_model_go_on_with_the_one_they_had(
    store: Store, tmp_path: Path
) -> None:
    first, second, third = (slot_of(name, "large") for name in ("a", "b", "c"))
    daemon = Daemon(store, [first, second, third], tmp_path)
    choose_default(daemon.slots)
    await daemon._keep_default_model()

    for name, is_kept in (("other", False), ("a", True)):
        first, second, third = slot_of(name), slot_of("b", "large"), slot_of("c", "small")
        assert isinstance(first.engine, AttachedEngine)
        first.models, first.engine.state = None, EnginePhase.UNREACHABLE
        daemon = Daemon(store, [first, second, third], tmp_path)
        choose_default(daemon.slots)
        await daemon._keep_default_model()
        serving = [slot.serves(DEFAULT_MODEL) for slot in daemon.slots]
        assert serving == [False, is_kept, False]
        views = view_engines(daemon.slots, GatewayFigures("", ""))
        assert [view["model"] for view in views] == [None] * 3, "it may have another"

    first.models = ("small",)
    choose_default(daemon.slots)
    assert [slot.serves(DEFAULT_MODEL) for slot in daemon.slots] == [True, False, True]


async def test_a_model_is_refused_that_only_an_engine_may_have_that_failed(
    store: Store, tmp_path: Path
) -> None:
    small, large = slot_of("small", "small"), slot_of("large")
    assert isinstance(large.engine, AttachedEngine)
    large.models, large.expected_model = None, "large"
    daemon = Daemon(store, [small, large], tmp_path)
    daemon.check_model("smal")

    large.engine.state = EnginePhase.FAILED
    daemon.check_model("small")
    daemon.check_model(DEFAULT_MODEL)
    with pytest.raises(InputError, match="serves 'smal'; they serve small; failed: large, see"):
        daemon.check_model("smal")


async def test_an_engine_goes_only_once_another_has_told_that_it_has_its_model(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.server.api.rolling.LOOK_S", 0.01)
    deployment, home = Deployment(base=tmp_path), Home(tmp_path)
    first, other = slot_of("a", "small"), slot_of("b")
    assert isinstance(first.engine, AttachedEngine) and isinstance(other.engine, AttachedEngine)
    daemon, fleets = Daemon(store, [first, other], tmp_path), Fleets(deployment, home)
    for models in (("small",), ("large",)):
        rolling = Rolling(daemon, fleets, home, lambda: deployment)
        other.engine.state, other.models = EnginePhase.STARTING, None
        asked = asyncio.create_task(rolling._may_leave(first))
        for state in (EnginePhase.STARTING, EnginePhase.READY):
            other.engine.state = state
            await asyncio.sleep(0.05)
            assert rolling.told == ["engine a: waits for another that may have its model"]
        other.models = models
        assert await asked is (models == first.models)
        assert rolling.failure is None or "alone has a model: a;" in rolling.failure
    rolling._before = {"a": frozenset({"small"}), "b": frozenset({"small", "adapter"})}
    assert await rolling._may_leave(first), "both had the old model, and the other has the new one"
    rolling._before = {}
    first.engine.state = EnginePhase.FAILED
    assert await rolling._may_leave(first)
    ones = [slot_of("c", "small"), slot_of("d", "large"), slot_of("e")]
    assert [rolling._share_models(first, each) for each in ones] == [True, False, True]


async def test_an_engine_goes_only_where_others_have_each_of_its_models(
    store: Store, tmp_path: Path
) -> None:
    deployment, home = Deployment(base=tmp_path), Home(tmp_path)
    first, second, third = (
        slot_of("a", "base", "support"), slot_of("b", "base"), slot_of("c", "support"),
    )  # fmt: skip
    assert isinstance(third.engine, AttachedEngine)
    third.engine.state = EnginePhase.STOPPED
    daemon = Daemon(store, [first, second, third], tmp_path)
    rolling = Rolling(daemon, Fleets(deployment, home), home, lambda: deployment)

    assert await rolling._may_leave(second)
    assert not await rolling._may_leave(first)
    assert rolling.told == ["engine a: runs on: no other engine has support"]
    assert rolling.failure is not None and "alone has a model: a;" in rolling.failure

    third.engine.state = EnginePhase.READY
    assert await rolling._may_leave(first)
    third.models = ()
    assert await rolling._may_leave(first), "it may have any"


@pytest.mark.parametrize("models", [None, ("base", "adapter")], ids=["untold", "told"])
@pytest.mark.parametrize("state", [EnginePhase.FAILED, EnginePhase.UNREACHABLE])
async def test_an_engine_whose_model_no_other_is_ready_for_is_skipped_and_the_next_one_goes(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: EnginePhase,
    models: tuple[str, ...] | None,
) -> None:
    monkeypatch.setattr("batchrun.server.api.rolling.TOLD_S", 0.0)
    monkeypatch.setattr("batchrun.server.api.rolling.LOOK_S", 0.0)
    deployment, home = Deployment(base=tmp_path), Home(tmp_path)
    first, second, away = slot_of("a", "base", "adapter"), slot_of("b", "base"), slot_of("c")
    assert isinstance(away.engine, AttachedEngine)
    away.engine.state, away.models = state, models
    daemon = Daemon(store, [first, second, away], tmp_path)
    rolling = Rolling(daemon, Fleets(deployment, home), home, lambda: deployment)

    assert not await rolling._may_leave(first)
    has_failed = state is EnginePhase.FAILED
    which = "no other engine has" if has_failed else "no other that is ready is known to have"
    assert rolling.told[-1] == f"engine a: runs on: {which} adapter"
    assert rolling.failure is not None and "alone has a model: a;" in rolling.failure
    assert await rolling._may_leave(second)


async def test_a_rolling_restart_tells_that_it_leaves_an_engine_beside_its_agent_as_it_is(
    tmp_path: Path, shared_fake_engine: ManagedSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchrun.daemon.fleets.OTHERS_LEARN_S", 0.0)
    rig, url = AgentRig(tmp_path), shared_fake_engine.base_url
    beside, other = (AttachedEngine(AttachedSettings(name=name, url=url)) for name in ("a", "b"))
    other.state = EnginePhase.READY
    deployment, home = Deployment(base=tmp_path), Home(tmp_path)
    async with AsyncExitStack() as exits:
        store = exits.enter_context(closing(open_store(tmp_path / "store.db")))
        async with rig.running(beside=beside) as agent:
            engine = await exits.enter_async_context(rig.connected())
            slots = [
                Slot(each, uses_priority=False, window=Window(9, 10**9), models=("fake",))
                for each in (engine, other)
            ]
            daemon, fleets = Daemon(store, slots, tmp_path), Fleets(deployment, home)
            rolling = Rolling(daemon, fleets, home, lambda: deployment)
            restarting = asyncio.create_task(rolling._restart(slots[0], None, 60.0))
            await until(lambda: agent.begins_anew)
        async with rig.running(beside=beside):
            await restarting
    assert [line.removeprefix("engine a: ") for line in rolling.told] == [
        "gets no more calls and rows",
        "has its agent restarted, and is left as it is",
        "is ready",
    ]


def slot_of(name: str, *models: str) -> Slot:
    engine = AttachedEngine(AttachedSettings(name=name, url="http://127.0.0.1:9"))
    engine.state = EnginePhase.READY
    return Slot(engine, uses_priority=False, window=Window(1_000, 10**9), models=models)


def test_an_engine_has_some_seconds_of_work_beyond_what_runs() -> None:
    load = RowLoad(0.5)
    assert load.has_room(100.0, 0)
    load.add(10, 0.5 * BOUND_S - 1)
    assert load.has_room(1.0, 0)
    assert not load.has_room(1.1, 0)
    assert load.has_room(1.1, 0, is_urgent=True)
    assert load.has_room(20.0, 1_000)


def test_a_speed_is_seen_while_the_engine_is_full() -> None:
    load = RowLoad()
    load.observe(0.0, is_full=True)
    for second in range(1, 101):
        load.ended(0.25)
        load.observe(float(second), is_full=True)
    assert load.speed == pytest.approx(0.25, abs=0.15)
    seen = load.speed
    load.observe(100.0, is_full=False)
    load.observe(200.0, is_full=False)
    assert load.speed == seen


def test_a_profile_of_twice_the_times_is_half_the_speed() -> None:
    usual = Prices()
    slow = Prices(
        2 * usual.base_s, 2 * usual.token_s, 2 * usual.pair_s, 0.0, 2 * usual.context_token_s
    )
    assert speed_of(usual) == pytest.approx(1.0)
    assert speed_of(slow) == pytest.approx(0.5)
