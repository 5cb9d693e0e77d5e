"""The places of flex calls: behind all offline work that is there, however much comes at once."""

from __future__ import annotations

import pytest
import scheduler_rig as rig
from vllm.v1.request import RequestStatus

from batchrun.hints import HINT_KEY, URGENT_LEAD, FlexHint, write_hint
from batchrun.scheduling.view import RequestView
from batchrun.simulator.virtual.setup import NONCE
from batchrun.vllm_plugin.scheduler import ColocatedScheduler


def add_flex(scheduler: ColocatedScheduler, name: str) -> RequestView:
    request = rig.make_request(name)
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {HINT_KEY: write_hint(FlexHint(), NONCE)}
    scheduler.add_request(request)
    return scheduler.state.views[name]


def test_a_flex_call_stands_behind_the_last_row_that_is_there() -> None:
    scheduler = rig.ours(rig.build())
    assert add_flex(scheduler, "first").rank == 0
    for row in (30, 70, 50):
        scheduler.add_request(rig.make_request(f"row-{row}", row=row, max_tokens=100))
    scheduler.add_request(rig.make_request("call"))
    assert add_flex(scheduler, "second").rank == 70

    for name in ("row-70", "second"):
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    assert add_flex(scheduler, "third").rank == 50
    rig.run(scheduler)
    assert add_flex(scheduler, "fourth").rank == 0


def test_the_engine_is_as_far_as_its_rows_whatever_urgent_ones_run() -> None:
    scheduler = rig.ours(rig.build())
    for rank in (3, URGENT_LEAD + 4, URGENT_LEAD + 9):
        scheduler.add_request(rig.make_request(f"row-{rank}", row=rank, max_tokens=9))
    for _ in range(3):
        rig.step(scheduler)

    assert scheduler.state.kv is not None
    assert scheduler.state.kv._reuse.front_rank == URGENT_LEAD + 4


def test_a_burst_of_flex_calls_looks_at_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = rig.ours(rig.build())
    num_looks = 0
    is_offline: property = vars(RequestView)["is_offline"]

    def look(view: RequestView) -> bool:
        nonlocal num_looks
        num_looks += 1
        return bool(is_offline.__get__(view))

    monkeypatch.setattr(RequestView, "is_offline", property(look))
    for number in range(200):
        add_flex(scheduler, f"flex-{number}")

    assert num_looks <= 10 * 200
