"""Laws, scenarios, feeders: what goes into the virtual engine."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean, median

import pytest

from batchrun.hints import RowHint, read_hint
from batchrun.simulator.virtual.feeder import DAEMON_WINDOW, JobFeeder, Window
from batchrun.simulator.virtual.laws import A100Law, NoisyLaw, PoolingLaw
from batchrun.simulator.virtual.scenarios import (
    CallTable,
    DocumentLengths,
    Job,
    JobShape,
    JobTable,
    OnlineCall,
    OnlineTraffic,
    Order,
    a100_8b,
    draw_calls,
    draw_job,
    draw_token_ids,
    echo_qa_long,
    echo_qa_short,
    echo_sharegpt,
    hit_optimum,
    kv_pressure,
    kv_pressure_tide,
    planned_order,
)
from batchrun.simulator.virtual.setup import NONCE

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
    tide, pressure = kv_pressure_tide().online, kv_pressure().online

    assert isinstance(tide, OnlineTraffic)
    assert isinstance(pressure, OnlineTraffic)
    assert kv_pressure_tide().duration_s == 7200
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


def test_length_buckets_keep_documents_whole_and_put_short_ones_first() -> None:
    job = draw_job(JobShape(12, (200, 3_000), (2, 4)), 1, Order.SHUFFLED)
    rows = planned_order(job, bucket_ratio=2.0).rows
    buckets = [int(math.log2(len(job.documents[row.document]))) for row in rows]

    assert len(set(buckets)) > 2
    assert buckets == sorted(buckets)
    assert sum(a.document != b.document for a, b in pairwise(rows)) == 11
    assert sorted(row.number for row in rows) == list(range(len(job.rows)))


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
    table = JobTable([DocumentLengths(40, [(5, 1), (6, 2)]), DocumentLengths(70, [(7, 3)])])
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
    table = JobTable([DocumentLengths(40, [(8, 1), (24, 1)]), DocumentLengths(70, [(2, 1)])])

    # The second row of the first document hits 2 of its blocks of 16.
    assert hit_optimum(draw_job(table, 0, Order.SHUFFLED)) == pytest.approx(32 / (48 + 64 + 72))


def test_echos_jobs_have_the_sizes_of_its_table_1() -> None:
    def mean_prompt(job: Job) -> float:
        return fmean(job.num_prompt_tokens(row) for row in job.rows)

    chat = draw_job(echo_sharegpt().job, 0, Order.SHUFFLED)
    short, long = (
        draw_job(scenario.job, 0, Order.SHUFFLED) for scenario in (echo_qa_short(), echo_qa_long())
    )

    assert mean_prompt(chat) == pytest.approx(308, rel=0.05)
    assert hit_optimum(chat) == 0.0
    assert mean_prompt(short) == pytest.approx(23_474, rel=0.05)
    assert mean_prompt(long) == pytest.approx(23_474, rel=0.05)
    assert fmean([hit_optimum(short), hit_optimum(long)]) == pytest.approx(0.91, abs=0.02)


def test_every_hint_points_at_the_next_row_of_its_document() -> None:
    job = draw_job(SMALL_JOB, 2, Order.SHUFFLED)
    hints = _hints(job)

    for rank, hint in enumerate(hints):
        later = [r for r in range(rank + 1, len(hints)) if _node(hints[r]) == _node(hint)]
        assert hint.rank == rank
        assert hint.row == job.rows[rank].number
        assert hint.nodes[0].num_rows_to_come == len(later)
        assert hint.nodes[0].next_rank == (later[0] if later else rank)


def test_the_feeder_keeps_to_its_window_and_its_pace() -> None:
    window = Window(max_requests=5, max_tokens=1500, tick_tokens=700, long_row_tokens=100)
    job = draw_job(SMALL_JOB, 3, Order.GROUPED)
    feeder = JobFeeder(job, window=window)
    inside: dict[str, int] = {}
    num_sent, now_s = 0, 0.0
    while num_sent < len(job.rows):
        sent = feeder.take_due(now_s)
        tokens = [len(arrival.prompt_token_ids) for arrival in sent]
        assert len(tokens) <= 1 or sum(tokens) <= window.tick_tokens
        inside |= {arrival.request_id: len(arrival.prompt_token_ids) for arrival in sent}
        assert len(inside) <= window.max_requests
        assert sum(inside.values()) <= window.max_tokens
        num_sent += len(sent)
        now_s += window.tick_s
        if not sent:
            done = min(inside)
            del inside[done]
            feeder.on_finished(done)


def test_long_rows_trickle_four_at_a_time() -> None:
    job = draw_job(JobShape(2, (5000, 5000), (8, 8)), 4, Order.GROUPED)
    feeder = JobFeeder(job, window=DAEMON_WINDOW)

    assert [len(feeder.take_due(tick * 0.1)) for tick in range(5)] == [4, 4, 4, 4, 0]


def _hints(job: Job) -> list[RowHint]:
    arrivals = JobFeeder(job, window=None).take_due(0.0)
    hints = [read_hint(arrival.hint, NONCE) for arrival in arrivals]
    return [hint for hint in hints if isinstance(hint, RowHint)]


def _node(hint: RowHint) -> int:
    return hint.nodes[0].node
