"""The plan selector: benefit less punishment, per second (Echo, Eq. 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

from batchrun.estimator import StepLoad
from batchrun.scheduling.draft import Draft
from batchrun.scheduling.view import RequestView


def loss_tokens(request: RequestView, num_tokens: int) -> int:
    """What `num_tokens` of a request's KV are worth: each row that reads them would compute them.

    The benefit of computing them, and the loss when a preemption gives them up.
    """
    return num_tokens * (1 + request.num_followers)


def score(draft: Draft) -> float:
    """Tokens per second that the draft adds to the batch which all drafts of a step share.

    Drafts differ in the long prefix that they begin. Beginning it commits the engine to finish it,
    so benefit and time are those of the whole prefix; wanted blocks that it would push out of the
    cache are its punishment.
    """
    leader = draft.leader
    if leader is None:
        return 0.0
    view = draft.view
    left = draft.leader_left_tokens
    benefit = loss_tokens(leader, left)
    evicted_blocks = max(0, view.wanted_blocks - (draft.free_blocks - draft.promised_blocks))
    seconds = view.model.predict_s(StepLoad.of([(left, leader.num_tokens, False)]))
    return (benefit - evicted_blocks * view.block_tokens) / max(seconds, 1e-6)


def select(drafts: Sequence[Draft]) -> Draft:
    """The draft with the highest score; the first of equals."""
    return drafts[0] if len(drafts) == 1 else max(drafts, key=score)
