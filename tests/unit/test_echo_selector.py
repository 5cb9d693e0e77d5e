"""Which document Echo begins: most benefit less punishment per second (Eq. 1 to 4)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from echo_views import decoding_row, held, idle, names, plan_of, row, view

from batchrun.estimator.step_time import LinearModel
from batchrun.scheduling.draft import Draft
from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.slack import StepLimits
from batchrun.scheduling.view import RequestView
from batchrun.scheduling.worth import loss_tokens, score, select

QUADRATIC = LinearModel(0.0, 1e-4, 2e-7, 0.0, 0.0)
"""1,000 tokens take 0.1 + 0.1 s, 2,000 take 0.2 + 0.4 s."""
WITH_BASE = LinearModel(0.01, 1e-4, 0.0, 0.0, 0.0)
"""600 tokens take 0.07 s, 1,500 take 0.16 s: the more the cheaper."""


def drafts_of(*waiting: RequestView, free_blocks: int = 1_000, **fields: Any) -> list[Draft]:
    engine = view(waiting=waiting, free_blocks=free_blocks, **fields)
    return EchoPolicy(EchoOptions(), ArrivalOrder()).generate(
        engine, StepLimits(math.inf, math.inf)
    )


def test_the_benefit_of_a_prefix_is_its_tokens_once_for_every_row_that_reads_it() -> None:
    assert loss_tokens(view(), row(num_followers=0), 2_000) == 2_000
    assert loss_tokens(view(), row(num_followers=9), 2_000) == 20_000


def test_the_score_is_benefit_per_second_of_the_whole_prefix() -> None:
    document = row(prompt=2_000, num_followers=2)

    (draft,) = drafts_of(document, model=QUADRATIC, token_budget=512)

    assert draft.caps == {"row": 512}
    assert score(draft) == pytest.approx(3 * 2_000 / 0.6)


def test_a_draft_that_begins_nothing_scores_zero() -> None:
    (draft,) = drafts_of(row("row 1"), row("row 2"))

    assert draft.leader is None
    assert score(draft) == 0.0


def test_the_document_that_most_rows_wait_for_is_begun() -> None:
    few = row("first of A", prompt=2_000, document="A", num_followers=3)
    many = row("first of B", prompt=2_000, document="B", num_followers=8)

    plan = plan_of(view(waiting=[few, many]))

    assert names(plan.admit) == ["first of B"]


def test_of_equal_documents_the_first_in_the_planned_order_is_begun() -> None:
    equals = [row(f"first of {x}", prompt=2_000, document=x, num_followers=3) for x in "CAB"]

    plan = plan_of(view(waiting=equals))

    assert names(plan.admit) == ["first of C"]


def test_a_document_that_is_not_clearly_better_does_not_overtake() -> None:
    few = row("first of A", prompt=2_000, document="A", num_followers=8)
    more = [row("first of B", prompt=2_000, document="B", num_followers=n) for n in (10, 11, 12)]

    begun = [names(plan_of(view(waiting=[few, other])).admit) for other in more]

    assert begun == [["first of A"], ["first of A"], ["first of B"]]


def test_the_document_that_takes_less_time_for_each_token_is_begun() -> None:
    long = row("first of A", prompt=2_000, document="A", num_followers=3)
    short = row("first of B", prompt=1_000, document="B", num_followers=3)

    plan = plan_of(view(waiting=[long, short], model=QUADRATIC))

    assert names(plan.admit) == ["first of B"]


def test_enough_readers_outweigh_the_slower_tokens_of_a_long_document() -> None:
    """10 * 3,333 tokens/s against 6 * 5,000."""
    long = row("first of A", prompt=2_000, document="A", num_followers=9)
    short = row("first of B", prompt=1_000, document="B", num_followers=5)

    plan = plan_of(view(waiting=[long, short], model=QUADRATIC))

    assert names(plan.admit) == ["first of A"]


def test_what_is_read_already_is_neither_benefit_nor_time() -> None:
    whole = row(prompt=1_000, num_followers=3)
    begun = row(prompt=2_000, hit=held(1_000), num_followers=3)

    (fresh_draft,), (begun_draft,) = drafts_of(whole), drafts_of(begun)

    assert begun_draft.leader_left_tokens == fresh_draft.leader_left_tokens == 1_000
    assert score(begun_draft) == pytest.approx(score(fresh_draft))


def test_a_document_that_pushes_out_wanted_kv_is_punished_for_its_tokens() -> None:
    """The 151 blocks that it takes leave 49, where rows to come want 149."""
    document = row(prompt=1_500, document="A", num_followers=1)
    engine = view(waiting=[document], free_blocks=200, wanted_blocks=149)

    (draft,) = EchoPolicy(EchoOptions(keeps_reserve=False), ArrivalOrder()).generate(
        engine, StepLimits(math.inf, math.inf)
    )

    assert score(draft) == pytest.approx((2 * 1_500 - 100 * 10) / 0.15, rel=1e-5)


def test_wanted_kv_that_it_hits_itself_is_no_punishment() -> None:
    """Of the 149 wanted blocks it hits 40; the 111 others that it takes leave 49 for the 109."""
    document = row(prompt=1_500, document="A", num_followers=1, hit=idle(400))
    engine = view(waiting=[document], free_blocks=200, wanted_blocks=149)

    (draft,) = EchoPolicy(EchoOptions(keeps_reserve=False), ArrivalOrder()).generate(
        engine, StepLimits(math.inf, math.inf)
    )

    assert draft.wanted_blocks(document) == 109
    assert score(draft) == pytest.approx((2 * 1_100 - 60 * 10) / 0.11, rel=1e-5)


def test_no_more_is_pushed_out_than_is_wanted() -> None:
    """It begins on the 11 blocks of a row that ends soon: less than none is left meanwhile."""
    document = row("first of B", prompt=990, document="B")
    ending = decoding_row("last of A", generated=8, output=40, document="A")
    engine = view(running=[ending], waiting=[document], free_blocks=95, wanted_blocks=4)

    (draft,) = EchoPolicy(EchoOptions(keeps_reserve=False), ArrivalOrder()).generate(
        engine, StepLimits(math.inf, math.inf)
    )

    assert draft.leader is document
    assert draft.free_blocks - draft.promised_blocks < 0
    assert score(draft) == pytest.approx((990 - 4 * 10) / 0.099, rel=1e-5)


def test_wanted_kv_that_it_would_push_out_can_cost_a_document_its_place() -> None:
    large = row("first of A", prompt=1_500, document="A", num_followers=2)
    small = row("first of B", prompt=600, document="B", num_followers=1)
    given: dict[str, Any] = {"waiting": [small, large], "wanted_blocks": 139, "model": WITH_BASE}

    with_room = plan_of(view(free_blocks=400, **given), "bs+e+s")
    without = plan_of(view(free_blocks=200, **given), "bs+e+s")

    assert names(with_room.admit) == ["first of A"]
    assert names(without.admit) == ["first of B"]


def test_only_the_first_four_documents_are_compared() -> None:
    followers = {"D": 1, "E": 99}
    documents = [
        row(f"first of {x}", prompt=2_000, document=x, num_followers=followers.get(x, 0))
        for x in "ABCDE"
    ]

    plan = plan_of(view(waiting=documents))

    assert names(plan.admit) == ["first of D"]


def test_drafts_differ_in_the_document_that_they_begin_and_in_nothing_else() -> None:
    documents = [row(f"first of {x}", prompt=2_000, document=x) for x in "AB"]
    short = row("row 3", document="C")
    engine = view(running=[decoding_row("row 0")], waiting=[*documents, short])

    drafts = EchoPolicy(EchoOptions(), ArrivalOrder()).generate(
        engine, StepLimits(math.inf, math.inf)
    )

    assert [names(draft.admitted) for draft in drafts] == [
        ["row 3", "first of A"],
        ["row 3", "first of B"],
    ]
    assert select(drafts) is drafts[0]
