"""Laws, scenarios, feeders: what goes into the virtual engine."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean, median

import pytest

from batchrun.hints import RowHint, read_hint
from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.online import OnlineCall, OnlineTraffic
from batchrun.simulator.virtual.setup import NONCE, A100Law
from benchmarks.laws import NoisyLaw, PoolingLaw
from benchmarks.row_feeds import RowSource, daemon_in_order, planned_order
from benchmarks.scenarios import (
    CONVERSATIONS,
    KV_PRESSURE,
    KV_PRESSURE_TIDE,
    QA_LONG,
    QA_SHORT,
    CallTable,
    Job,
    JobTable,
    Order,
    a100_8b,
    draw_calls,
    draw_job,
    draw_token_ids,
    hit_optimum,
)

SMALL_JOB = JobShape(num_documents=6, document_tokens=(200, 400), questions=(2, 5))


def test_a_prefill_on_the_a100_is_bound_by_arithmetic() -> None:
    # c = (16e9 * 2048 + 4 * 2048 * (3048 - 1024) * 4096 * 32) / 220e12 = 0.158823 s
    # m = (16e9 + 131072 * 3048) / 1.4e12 = 0.011714 s
    assert A100Law().step_s([(2048, 3048, False)]) == pytest.approx(0.164752, abs=1e-6)


def test_a_decode_on_the_a100_is_bound_by_memory() -> None:
    # c = (16e9 * 10 + 10 * 4 * 999.5 * 4096 * 32) / 220e12 = 0.000751 s
    # m = (16e9 + 131072 * 10 * 1000) / 1.4e12 = 0.012365 s
    assert A100Law().step_s([(1, 1000, True)] * 10) == pytest.approx(0.015553, abs=1e-6)


def test_the_second_law_follows_equations_6_to_8() -> None:
    law = PoolingLaw(overhead_s=0.0)
    prefill_s = 1.2e-9 * 512**2 + 7.3e-5 * 512
    decode_s = 3e-7 * 3000 + 8e-7 * 2000
    decodes = [(1, 1000, True), (1, 3000, True)]

    assert law.step_s([(512, 512, False)]) == pytest.approx(prefill_s)
    assert law.step_s([(8, 8, False)]) == pytest.approx(0.003)
    assert law.step_s(decodes) == pytest.approx(decode_s)
    mixed_s = 0.8 * prefill_s + 0.2 * decode_s
    assert law.step_s([(512, 512, False), *decodes]) == pytest.approx(mixed_s)


def test_chunks_of_a_prompt_cost_the_second_law_its_square_once() -> None:
    law = PoolingLaw(overhead_s=0.0, beta_s=0.0, floor_s=0.0)
    chunks_s = law.step_s([(300, 300, False)]) + law.step_s([(700, 1000, False)])

    assert chunks_s == pytest.approx(law.step_s([(1000, 1000, False)]))


def test_noise_is_centred_repeatable_and_hidden_from_the_expected_law() -> None:
    items = [(1, 1000, True)]
    exact_s = A100Law().step_s(items)
    noisy, again = (NoisyLaw(A100Law(), random.Random(3)) for _ in range(2))
    factors = [noisy.step_s(items) / exact_s for _ in range(5000)]

    assert [again.step_s(items) / exact_s for _ in range(5000)] == factors
    assert median(factors) == pytest.approx(1.0, abs=0.01)
    assert fmean(factor > 2 for factor in factors) == pytest.approx(0.01, abs=0.005)
    assert noisy.expected.step_s(items) == exact_s


def test_token_ids_are_those_of_randint() -> None:
    bulk, single = random.Random(5), random.Random(5)

    assert draw_token_ids(bulk, 3000).tolist() == [single.randint(5, 2000) for _ in range(3000)]
    assert bulk.random() == single.random()


def test_seed_0_draws_what_the_design_measured() -> None:
    scenario = a100_8b()
    calls = draw_calls(scenario, 0)
    job = draw_job(scenario.job, 0, Order.SHUFFLED)
    first = job.rows[0]

    assert (len(calls), sum(call.num_prompt_tokens for call in calls)) == (676, 212_100)
    assert len(job.rows) == 1327
    assert sum(job.num_prompt_tokens(row) for row in job.rows) == 23_991_860
    assert (job.num_prompt_tokens(first), first.num_output_tokens) == (25_358, 14)


@pytest.mark.parametrize("burst_factor", [4.0, 6.0])
def test_bursts_multiply_the_rate_of_the_reference_scenario(burst_factor: float) -> None:
    traffic = a100_8b(burst_factor=burst_factor).online

    assert isinstance(traffic, OnlineTraffic)
    assert traffic.rate_at(0.0) == pytest.approx(2 * burst_factor)
    assert traffic.rate_at(60.0) == pytest.approx(2 * (1 + 0.8 * math.sin(1)))
    assert traffic.rate_at(95.0) == pytest.approx(
        traffic.rate_at(95.0 + 60 * math.tau) * burst_factor
    )


def test_the_tide_repeats_the_pressure_for_two_hours() -> None:
    tide, pressure = KV_PRESSURE_TIDE.online, KV_PRESSURE.online

    assert isinstance(tide, OnlineTraffic)
    assert isinstance(pressure, OnlineTraffic)
    assert KV_PRESSURE_TIDE.duration_s == 7200
    assert tide.prompt == pressure.prompt
    assert tide.rate_at(1830) == pytest.approx(1.5, abs=0.01)
    assert tide.rate_at(5430) == pytest.approx(0.5, abs=0.01)


def test_the_planned_order_groups_shuffled_rows_and_loses_none() -> None:
    shuffled = draw_job(SMALL_JOB, 1, Order.SHUFFLED)
    documents = [row.document for row in planned_order(shuffled).rows]
    num_changes = sum(a != b for a, b in pairwise(documents))

    assert num_changes == SMALL_JOB.num_documents - 1
    assert sorted(row.number for row in planned_order(shuffled).rows) == list(
        range(len(shuffled.rows))
    )


def test_a_trace_is_slowed_and_read_in_a_circle() -> None:
    table = CallTable([0.0, 1.0, 4.0], [10, 20, 30], [1, 2, 3], 5.0, time_scale=2.0, window_s=3.0)

    assert table.draw(10.0, 0) == [
        OnlineCall(0.0, 10, 1),
        OnlineCall(2.0, 20, 2),
        OnlineCall(8.0, 30, 3),
    ]
    assert table.draw(8.0, 1) == [OnlineCall(5.0, 30, 3), OnlineCall(7.0, 10, 1)]
    assert table.draw(9.0, 4) == [
        OnlineCall(0.0, 20, 2),
        OnlineCall(6.0, 30, 3),
        OnlineCall(8.0, 10, 1),
    ]


def test_a_job_table_has_a_row_for_every_question() -> None:
    table = JobTable([(40, [(5, 1), (6, 2)]), (70, [(7, 3)])])
    job = draw_job(table, 0, Order.GROUPED)
    shuffled = draw_job(table, 0, Order.SHUFFLED)

    assert [len(document) for document in job.documents] == [40, 70]
    assert [(r.document, len(r.question), r.num_output_tokens) for r in job.rows] == [
        (0, 5, 1),
        (0, 6, 2),
        (1, 7, 3),
    ]
    assert sorted(row.number for row in shuffled.rows) == [0, 1, 2]


def test_the_optimum_computes_each_document_once() -> None:
    table = JobTable([(40, [(8, 1), (24, 1)]), (70, [(2, 1)])])

    # The second row of the first document hits 2 of its blocks of 16.
    assert hit_optimum(draw_job(table, 0, Order.SHUFFLED)) == pytest.approx(32 / (48 + 64 + 72))


def test_echos_jobs_have_the_sizes_of_its_table_1() -> None:
    def mean_prompt(job: Job) -> float:
        return fmean(job.num_prompt_tokens(row) for row in job.rows)

    chat = draw_job(CONVERSATIONS, 0, Order.SHUFFLED)
    short, long = (draw_job(shape, 0, Order.SHUFFLED) for shape in (QA_SHORT, QA_LONG))

    assert mean_prompt(chat) == pytest.approx(308, rel=0.05)
    assert hit_optimum(chat) == 0.0
    assert mean_prompt(short) == pytest.approx(23_474, rel=0.05)
    assert mean_prompt(long) == pytest.approx(23_474, rel=0.05)
    assert fmean([hit_optimum(short), hit_optimum(long)]) == pytest.approx(0.91, abs=0.02)


@pytest.mark.parametrize("sender", ["daemon", "no daemon"])
def test_every_hint_points_at_the_next_row_of_its_document(sender: str) -> None:
    job = draw_job(SMALL_JOB, 2, Order.SHUFFLED)
    source = daemon_in_order(job).ports[0] if sender == "daemon" else RowSource(job)
    sent = [read_hint(row.hint, NONCE) for row in source.take_due(0.0)]
    hints = [hint for hint in sent if isinstance(hint, RowHint)]
    first_rank = hints[0].rank

    assert len(hints) == len(job.rows)
    for place, hint in enumerate(hints):
        later = [r for r in range(place + 1, len(hints)) if _node(hints[r]) == _node(hint)]
        assert hint.rank == first_rank + place
        assert _node(hint) == job.rows[place].document + 1
        assert hint.nodes[0].num_rows_to_come == len(later)
        assert hint.nodes[0].next_rank == first_rank + (later[0] if later else place)


def test_without_a_daemon_rows_come_as_others_end() -> None:
    job = draw_job(SMALL_JOB, 3, Order.GROUPED)
    source = RowSource(job, 5)
    first = [row.request_id for row in source.take_due(0.0)]

    assert len(first) == 5
    assert source.next_due_s == math.inf
    source.on_finished(first[2])
    assert [row.request_id for row in source.take_due(1.0)] == ["row-0000005"]


def _node(hint: RowHint) -> int:
    return hint.nodes[0].node
