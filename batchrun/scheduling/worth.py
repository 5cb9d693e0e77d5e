"""What offline work is worth: which draft becomes the step, and whom online demand pushes out.

The plan selector takes the draft with the most benefit less punishment, per second (Echo, Eq. 3
and 4); the same worth of KV chooses the victims of a preemption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchrun.estimator.step_load import StepLoad
from batchrun.scheduling.draft import Draft
from batchrun.scheduling.view import EngineView, Group, RequestView


def loss_tokens(view: EngineView, request: RequestView, num_tokens: int) -> int:
    """What `num_tokens` of a request's KV are worth: each row that reads them would compute them.

    The benefit of computing them, and the loss when a preemption gives them up.
    """
    return num_tokens * (1 + view.num_followers(request))


def score(draft: Draft) -> float:
    """Tokens per second that the draft adds to the batch which all drafts of a step share.

    Drafts differ in the long prefix that they begin. Beginning it commits the engine to finish it,
    so benefit and time are those of the whole prefix. Its punishment are the wanted blocks that it
    would push out of the cache: what the step and all that it promises leave no room for.
    """
    leader = draft.leader
    if leader is None:
        return 0.0
    view = draft.view
    left = draft.leader_left_tokens
    benefit = loss_tokens(view, leader, left)
    wanted_blocks = draft.wanted_blocks(leader)
    left_blocks = draft.free_blocks - draft.promised_blocks
    evicted_blocks = wanted_blocks - min(wanted_blocks, max(0, left_blocks))
    seconds = view.model.predict_s(StepLoad.of([(left, leader.num_tokens, False)]))
    return (benefit - evicted_blocks * view.block_tokens) / max(seconds, 1e-6)


CLEAR_SHARE = 0.25
"""A draft that scores less than the best by no more than this share is about as good."""


def select(drafts: Sequence[Draft]) -> Draft:
    """The first draft that is about as good as the best: the planned order comes from the same
    worth and knows the whole job, so it stands unless another draft is clearly better."""
    if len(drafts) == 1:
        return drafts[0]
    scores = [score(draft) for draft in drafts]
    best = max(scores)
    least = best - CLEAR_SHARE * abs(best)
    return next(draft for draft, its in zip(drafts, scores, strict=True) if its >= least)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Requests to preempt together: one, or all that run of a prefix group.

    The blocks that a group shares are free once the last of them is gone.
    """

    requests: Sequence[RequestView]
    freed_blocks: int
    loss_tokens: int


class Victims:
    """Whom online demand may push out of one draft. Looked at when somebody must go, and once."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._rows: list[_Choice] | None = None
        self._broken_groups: set[Group | None] = set()
        self._adapters: dict[int, list[_Choice]] = {}
        self._adapters_known_at = (-1, -1)

    def make_room(self, blocks: int, slots: int = 0) -> None:
        """Preempt offline requests until so many blocks and slots are free, least loss first.

        Nobody goes where even all of them together would not do.
        """
        draft = self._draft
        if blocks > draft.free_blocks + draft.offline_blocks:
            return
        while draft.free_blocks < blocks or draft.slots_left < slots:
            choices = [*self._left(), *self._groups()]
            if not choices:
                return
            short = blocks - draft.free_blocks
            enough = [choice for choice in choices if choice.freed_blocks >= short]
            if enough:
                self._preempt(min(enough, key=lambda choice: choice.loss_tokens))
            else:
                self._preempt(max(choices, key=lambda choice: choice.freed_blocks))

    def may_have_adapter(self, request: RequestView) -> bool:
        """Whether the adapter of a waiting call fits, or offline requests hold one that no online
        request uses. Once False for a call, it stays so in the draft."""
        return self._draft.fits_lora(request) or bool(self._by_adapter())

    def free_adapter(self) -> None:
        """Preempt the offline requests of one such adapter, least loss first."""
        rows = self._by_adapter()
        adapter = min(rows, key=lambda lora_id: sum(row.loss_tokens for row in rows[lora_id]))
        for row in rows[adapter]:
            self._preempt(row)
        self._draft.loras.discard(adapter)

    def _by_adapter(self) -> dict[int, list[_Choice]]:
        """Looked at again when somebody was admitted or preempted."""
        draft = self._draft
        known_at = len(draft.admitted), len(draft.preempted)
        if known_at == self._adapters_known_at:
            return self._adapters
        in_use = {r.lora_id for r in (*draft.view.online_running, *draft.admitted)}
        rows: dict[int, list[_Choice]] = {}
        for row in self._left():
            lora_id = row.requests[0].lora_id
            if lora_id and lora_id not in in_use:
                rows.setdefault(lora_id, []).append(row)
        self._adapters, self._adapters_known_at = rows, known_at
        return rows

    def _left(self) -> list[_Choice]:
        """Those that still run, one by one."""
        if self._rows is None:
            view, gone = self._draft.view, set(map(id, self._draft.preempted))
            running = [request for request in view.offline_running if id(request) not in gone]
            self._rows = [_alone(view, request) for request in running]
        return self._rows

    def _groups(self) -> Iterator[_Choice]:
        """Those that still run of each prefix group, together."""
        groups: dict[Group, list[_Choice]] = {}
        for row in self._left():
            group = row.requests[0].group
            if group is not None:
                groups.setdefault(group, []).append(row)
        for group, rows in groups.items():
            if len(rows) > 1 or group in self._broken_groups:
                yield _together(self._draft.view, rows)

    def _preempt(self, victims: _Choice) -> None:
        freed_blocks = victims.freed_blocks
        for request in victims.requests:
            self._draft.preempt(request, freed_blocks)
            freed_blocks = 0
        gone = set(map(id, victims.requests))
        self._rows = [row for row in self._left() if id(row.requests[0]) not in gone]
        self._broken_groups.add(victims.requests[0].group)


def _alone(view: EngineView, request: RequestView) -> _Choice:
    blocks = view.private_blocks(request)
    return _Choice((request,), blocks, loss_tokens(view, request, blocks * view.block_tokens))


def _together(view: EngineView, rows: Sequence[_Choice]) -> _Choice:
    requests = [row.requests[0] for row in rows]
    held = view.law.kept([request.num_computed_tokens for request in requests])
    shared = max(0, min(blocks - row.freed_blocks for blocks, row in zip(held, rows, strict=True)))
    return _Choice(
        requests,
        shared + sum(row.freed_blocks for row in rows),
        loss_tokens(view, requests[0], shared * view.block_tokens)
        + sum(row.loss_tokens for row in rows),
    )
