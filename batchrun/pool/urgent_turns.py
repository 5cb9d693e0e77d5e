"""Turns beside the fair share: a part of all tokens goes to a job because its deadline needs it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

PATIENCE = 0.5
"""Share of a quantum for which a job waits until the subtree before it is handed out."""
MOST_DEBT = 0.25
"""A job is ahead of its share by no more than this part of the work that it has left: the less it
has left, the longer would it wait until the others have caught up."""


class Claim(NamedTuple):
    """The share of all tokens that a job needs, and the tokens that it has left."""

    share: float
    left_tokens: float


class UrgentTurns:
    """Keeps claims on shares of all tokens that are handed out, earliest deadline first.

    A job's credit grows by its share of every token handed out, and falls by its own tokens. It
    takes the turn when there is credit, and keeps it until its subtree is handed out or it is a
    quantum ahead of its share. A new job starts with a quantum of credit: it goes at once. Tokens
    that it got by fair share count as well, so a claim below the fair share changes nothing.
    """

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._claims: dict[str, Claim] = {}
        self._credits: dict[str, float] = {}
        self._turn: str | None = None

    def claim(self, claims: Mapping[str, Claim]) -> None:
        """From now on these shares (0 to 1, together below 1), the earliest deadline first."""
        self._claims = dict(claims)
        for job_id in claims:
            self._credits.setdefault(job_id, self._quantum_tokens)

    def leave(self, job_id: str) -> None:
        """The job claims nothing any more."""
        self._claims.pop(job_id, None)
        self._credits.pop(job_id, None)
        self.end_turn(job_id)

    def choose(self, ready: AbstractSet[str], *, is_between_turns: bool) -> str | None:
        """The ready job with the earliest deadline that is behind its share, or None.

        `is_between_turns`: no fair turn would be interrupted.
        """
        if not self._claims:
            return None
        is_free = is_between_turns and self._turn not in ready
        least_credit = 0.0 if is_free else PATIENCE * self._quantum_tokens
        for job_id, claim in self._claims.items():
            least = self._least_credit(claim) if job_id == self._turn else least_credit
            if self._credits[job_id] > least and job_id in ready:
                self._turn = job_id
                return job_id
        self._turn = None
        return None

    def charge(self, job_id: str, tokens: int, *, is_urgent: bool = True) -> None:
        """A row of any job was handed out, urgent or by fair share.

        Tokens by fair share lower a credit no further than to its least. A row by a claim is owed
        in full, or claims would get more than their shares and leave nothing to the others; but
        for the last rows of a job, which are few.
        """
        for claimer, claim in self._claims.items():
            before = self._credits[claimer]
            credit = before + claim.share * tokens
            if claimer == job_id:
                credit -= tokens
                if not is_urgent or self._ends_soon(claim):
                    credit = max(credit, min(before, self._least_credit(claim)))
            self._credits[claimer] = min(credit, self._quantum_tokens)

    def end_turn(self, job_id: str) -> None:
        """The job's subtree is handed out."""
        if self._turn == job_id:
            self._turn = None

    def check(self, job_ids: AbstractSet[str]) -> None:
        """Raises AssertionError when a claim is out of bounds, or not of one of these jobs."""
        assert sum(claim.share for claim in self._claims.values()) < 1
        assert self._claims.keys() <= self._credits.keys() <= job_ids
        assert all(credit <= self._quantum_tokens for credit in self._credits.values())

    def _ends_soon(self, claim: Claim) -> bool:
        return MOST_DEBT * claim.left_tokens < self._quantum_tokens

    def _least_credit(self, claim: Claim) -> float:
        return -min(self._quantum_tokens, MOST_DEBT * claim.left_tokens)
