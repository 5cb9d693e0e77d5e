"""The parts of `benchmarks.cpu_colocation` that decide what its figures mean."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeEngineFactory

from batchrun.engine.client import EngineClient
from batchrun.errors import EngineError
from batchrun.pool.row_queue import Window
from batchrun.simulator.replay import OnlineResult
from batchrun.store.database import Store, open_store
from benchmarks.cpu_colocation import Session, bars, pairs_of
from benchmarks.cpu_colocation_rows import Feeder, RowStream
from benchmarks.cpu_colocation_servers import slo_of
from benchmarks.records import Record
from benchmarks.replay import keeps_deadlines, summarize
from benchmarks.text_jobs import DocumentSet

SETS = DocumentSet(num_documents=3, document_tokens=(300, 600), num_questions=4, output_tokens=2)
TTFT_S, TPOT_S = 0.5, 0.1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store.db")


def stream(
    store: Store, folder: Path, *, is_shuffled: bool = False, nonce: str | None = None
) -> RowStream:
    """Sets of three small documents."""
    return RowStream(folder, store, 0, is_shuffled, nonce, SETS)


async def test_planned_rows_come_document_by_document_with_hints(
    store: Store, tmp_path: Path
) -> None:
    rows = await take(stream(store, tmp_path, nonce="secret"), 12)

    hints = [json.loads(body["vllm_xargs"]["batchrun"]) for body in rows]

    assert [hint["rank"] - hints[0]["rank"] for hint in hints] == list(range(12))
    assert [hint["nodes"][0][1] for hint in hints] == [3, 2, 1, 0] * 3
    assert all(hint["nonce"] == "secret" for hint in hints)


async def test_shuffled_rows_carry_a_priority_and_no_hint(store: Store, tmp_path: Path) -> None:
    shuffled = await take(stream(store, tmp_path, is_shuffled=True), 12)
    planned = await take(stream(store, tmp_path), 12)

    assert all("vllm_xargs" not in body and body["priority"] == 1 for body in shuffled)
    assert texts(shuffled) != texts(planned)
    assert sorted(texts(shuffled)) == sorted(texts(planned))


async def test_the_stream_goes_on_with_fresh_documents(store: Store, tmp_path: Path) -> None:
    rows = await take(stream(store, tmp_path), 24)

    assert len(set(texts(rows))) == 24


async def test_the_feeder_keeps_its_window_full_and_aborts_at_the_end(
    store: Store, tmp_path: Path, fake_engine: FakeEngineFactory
) -> None:
    settings = await fake_engine("--latency-s=60", "--model=tiny")
    client = EngineClient(settings.base_url)
    rows = stream(store, tmp_path, is_shuffled=True).rows()
    feeder = Feeder(client, rows, Window(max_waiting=5, max_tokens=100_000))

    task = asyncio.create_task(feeder.run())
    while len(feeder.sent_s) < 5:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    in_flight = len(feeder.sent_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.close()

    assert in_flight == 5
    assert not feeder.sent_s
    assert (feeder.window.num_rows, feeder.window.num_tokens) == (0, 0)


def test_a_pair_with_a_disturbed_worker_is_dropped_whatever_its_ratio() -> None:
    windows = [
        window("bs", 0, served=10.0),
        window("echo", 0, served=30.0),
        window("bs", 1, served=10.0),
        window("echo", 1, served=90.0, core=0.84),
    ]

    pairs = pairs_of(windows, "bs")

    assert pairs.select("ratio", "is_kept").rows() == [(3.0, True), (9.0, False)]
    assert {bar.name: bar.value for bar in bars(windows)}["echo / bs, median"] == 3.0


def test_grouped_rows_are_a_bar_only_where_they_break_their_slo() -> None:
    echo = window("echo", 0, served=80.0)
    paired = [window("bs", 0, served=10.0), echo]
    broken = [*paired, window("grouped", 0, served=100.0, attainment=0.3)]
    kept = [*paired, window("grouped", 0, served=100.0, attainment=0.5)]

    assert bars(broken)[-1].bound == 0.75
    assert bars(kept)[-1].bound is None
    assert bars(broken)[-1].value == pytest.approx(0.8)


def test_a_resumed_run_measures_what_is_missing_in_order() -> None:
    session = Session(None, [window("bs", 0, served=1.0), window("grouped", 0, served=1.0)])

    assert session.missing(2, 1) == [("echo", 0), ("bs", 1), ("echo", 1)]
    assert session.slo() is None


def test_ratio_per_second_of_worker_cpu_forgives_a_slower_core() -> None:
    windows = [window("bs", 0, served=10.0, core=1.0), window("echo", 0, served=27.0, core=0.9)]

    assert pairs_of(windows, "bs")["ratio_per_cpu_s"][0] == pytest.approx(3.0)


def test_a_call_without_a_first_token_missed_every_bound() -> None:
    lost = OnlineResult(0.0, None, 20.0, (), 0, error="no complete answer within 20 s")
    good = OnlineResult(0.0, 0.4, 0.6, (0.1, 0.1), 3)

    figures = summarize([lost, good], slo_ttft_s=TTFT_S, slo_tpot_s=TPOT_S)

    assert (figures["slo_attainment"], figures["slo_deadline"]) == (0.5, 0.5)
    assert figures["online_longest_wait_s"] == 20.0


def test_the_deadline_lets_an_early_first_token_pay_for_a_late_one() -> None:
    late_second = OnlineResult(0.0, 0.1, 0.55, (0.45,), 2)
    too_late = OnlineResult(0.0, 0.1, 0.75, (0.65,), 2)

    assert keeps_deadlines(late_second, TTFT_S, TPOT_S)
    assert not keeps_deadlines(too_late, TTFT_S, TPOT_S)


def test_the_slo_is_twelve_times_the_tpot_of_calls_alone() -> None:
    alone = [OnlineResult(0.0, 0.1, 0.1 + gap_s, (gap_s,), 2) for gap_s in (0.004, 0.005, 0.006)]

    assert slo_of(alone).tpot_s == pytest.approx(0.06)


def test_no_slo_is_made_of_tokens_that_came_in_clumps() -> None:
    clumped = OnlineResult(0.0, 0.1, 0.1001, (0.0001,), 20)

    with pytest.raises(EngineError, match="quiet machine"):
        slo_of([clumped])


async def take(stream: RowStream, num_rows: int) -> list[dict[str, Any]]:
    rows = stream.rows()
    return [dict((await anext(rows))[0].body) for _ in range(num_rows)]


def texts(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["messages"][0]["content"] for body in bodies]


def window(
    server: str, seed: int, *, served: float, core: float = 1.0, attainment: float = 1.0
) -> Record:
    return {
        "server": server,
        "seed": seed,
        "offline_tokens_per_s": served,
        "worker_cpu_share": core,
        "slo_attainment": attainment,
        "prefix_hit_rate": 0.9,
    }
