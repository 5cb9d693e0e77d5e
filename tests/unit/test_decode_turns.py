"""Over many steps every row that decodes has its turn, however many there are."""

from __future__ import annotations

from echo_views import decoding_call, decoding_row, prefilling_row, view

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.fill import EARLY_STEPS
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.view import RequestView
from batchrun.vllm_plugin.planner import running_order

NUM_STEPS = 300


def test_no_row_stands_still_while_others_begin_to_decode() -> None:
    """20 rows decode for a long time, then 150, and every second step one more, beside a prompt
    without end; those put off go to the end of the running ones, as vLLM has them."""
    policy = EchoPolicy(EchoOptions(), ArrivalOrder())
    call = decoding_call(due_in_s=-3.0)

    def caps(rows: list[RequestView]) -> dict[str, int]:
        reading = prefilling_row("reading", prompt=90_000, left=50_000)
        seen = view(
            running=[call, *rows, reading],
            total_blocks=50_000,
            free_blocks=40_000,
            max_running=1_000,
        )
        plan = policy.plan(seen)
        order = running_order(plan, seen)
        rows.sort(key=lambda row: order.index(row.handle))
        assert plan.caps["reading"] > 0
        return dict(plan.caps)

    rows = [decoding_row(f"row {i}") for i in range(20)]
    for _ in range(EARLY_STEPS):
        caps(rows)
    rows += [decoding_row(f"row {i}") for i in range(20, 150)]
    decoded_at = {row.request_id: 0 for row in rows}
    longest = 0
    for step in range(1, NUM_STEPS):
        given = caps(rows)
        for row in rows:
            if given.get(row.request_id, 1):
                longest = max(longest, step - decoded_at[row.request_id])
                decoded_at[row.request_id] = step
        if step % 2 == 0:
            rows.append(decoding_row(f"row {150 + step}"))
            decoded_at[rows[-1].request_id] = step

    assert min(decoded_at.values()) >= NUM_STEPS - 10
    assert 1 < longest <= 10
