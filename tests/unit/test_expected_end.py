"""Until where an answer is expected to go: what room is set aside for."""

from __future__ import annotations

import pytest
import scheduler_rig as rig
from msgspec import UNSET, UnsetType
from vllm.v1.request import RequestStatus

from batchrun.hints import HINT_KEY, FlexHint, RowHint, write_hint
from batchrun.scheduling.view import RequestView
from batchrun.simulator.virtual.setup import NONCE
from batchrun.types import RequestClass
from batchrun.vllm_plugin.settings import OnlineSlo
from batchrun.vllm_plugin.state import make_view


def view_of(hint: RowHint | FlexHint, max_tokens: int = 30_000) -> RequestView:
    request = rig.make_request("row", 40, max_tokens=max_tokens)
    return make_view(request, hint, OnlineSlo(), 0.0)


def row_hint(output_tokens: int | UnsetType) -> RowHint:
    return RowHint(epoch=1, job="job", row=0, rank=0, output_tokens=output_tokens)


@pytest.mark.parametrize(
    ("hint", "answer_tokens"),
    [(row_hint(200), 200), (row_hint(0), 64)],
)
def test_an_answer_is_expected_to_end_where_the_hint_says(
    hint: RowHint | FlexHint, answer_tokens: int
) -> None:
    assert view_of(hint).end_tokens == 40 + answer_tokens


def test_an_answer_never_ends_behind_its_max_tokens() -> None:
    assert view_of(row_hint(200), max_tokens=32).end_tokens == 40 + 32


@pytest.mark.parametrize("hint", [FlexHint(), row_hint(UNSET)])
def test_of_what_no_hint_tells_the_engine_learns_by_itself(hint: RowHint | FlexHint) -> None:
    state = rig.ours(rig.build(max_model_len=32_768)).state

    def enter(name: str, hint: RowHint | FlexHint) -> RequestView:
        request = rig.make_request(name, 40, max_tokens=30_000)
        assert request.sampling_params is not None
        request.sampling_params.extra_args = {HINT_KEY: write_hint(hint, NONCE)}
        return state.enter(request)[0]

    first = enter("first", hint)
    for number in range(200):
        request = enter(f"row {number}", hint).handle
        request.append_output_token_ids([7] * 20)
        request.status = RequestStatus.FINISHED_STOPPED
        state.leave(request)
    first.handle.status = RequestStatus.FINISHED_ABORTED
    state.leave(first.handle)

    assert first.expected_output_tokens == 128
    assert 20 <= enter("next", hint).expected_output_tokens <= 22
    assert enter("told", row_hint(300)).expected_output_tokens == 300


def test_an_answer_longer_than_expected_is_taken_to_go_on_a_little() -> None:
    view = view_of(row_hint(200), max_tokens=400)

    view.num_output_tokens = 240
    assert view.end_tokens == 40 + 240 + 64
    view.num_output_tokens = 390
    assert view.end_tokens == 40 + 400


def test_without_an_expectation_room_is_set_aside_for_all_that_may_be_generated() -> None:
    view = RequestView("row", RequestClass.OFFLINE, 0.0, 40, max_output_tokens=900)

    assert view.end_tokens == 940
