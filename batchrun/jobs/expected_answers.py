"""How long the answers of a job are expected to be, before and while it runs.

What came back; before that a column of good answers, the newest job of the same model, or a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchrun.errors import MixedTypesError
from batchrun.estimator.answer_length import REMEMBERED_ANSWERS, AnswerLengths
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.spec import JobSpec
from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.prompt_study import FloatArray
from batchrun.store import jobs as job_records
from batchrun.store import results as result_records
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord
from batchrun.types import DEFAULT_MODEL, USUAL_OUTPUT_TOKENS

LIMIT_KEYS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
EMBEDDINGS = "/v1/embeddings"
ANSWER_COLUMNS = ("answer", "answers", "reference", "expected", "completion", "output")
"""A column of such a name that the job keeps holds what a good answer would be."""
MAX_RESULTS = 2_000
"""So many finished rows are looked at one by one; means are of all."""
MAX_JOBS = 32
"""Jobs before this one among which one of the same model is looked for."""

Stored = tuple[Store, JobRecord | None]
"""A store, and the job in it; None for a job that was not submitted."""


class DefaultModel(NamedTuple):
    """What answers where no model is named; `is_sure`: its replies tell that very name."""

    name: str | None = None
    is_sure: bool = False


UNKNOWN_MODEL = DefaultModel()


@dataclass(frozen=True, slots=True, eq=False)
class OutputEstimate:
    """`tokens[row]` is NaN where nothing is known of the row; `source` says where they are from."""

    tokens: FloatArray
    mean: float | None
    source: str

    @property
    def filled(self) -> FloatArray:
        """One value for every row: the mean where nothing is known, 0 where that is unknown too."""
        filled: FloatArray = np.where(np.isnan(self.tokens), self.mean or 0.0, self.tokens)
        return filled

    @property
    def std(self) -> float | None:
        """Deviation over the rows of which something is known."""
        return float(np.nanstd(self.tokens)) if (~np.isnan(self.tokens)).any() else None


def num_choices(request: Mapping[str, object]) -> int:
    """Answers of one row, `n` of them; one where its columns tell."""
    number = request.get("n")
    return max(1, number) if isinstance(number, int) else 1


def output_limit(spec: JobSpec) -> int | None:
    """The most output tokens of a row, in all its choices, that the job file allows, if it says."""
    if isinstance(spec.request.get("n"), str):
        return None
    limits = (spec.request.get(key) for key in LIMIT_KEYS)
    limit = next((limit for limit in limits if isinstance(limit, int)), None)
    return limit and limit * num_choices(spec.request)


def first_guess(spec: JobSpec) -> int:
    """What is expected while nothing is known: 128 tokens a choice, or a smaller limit."""
    if spec.endpoint == EMBEDDINGS:
        return 0
    usual = USUAL_OUTPUT_TOKENS * num_choices(spec.request)
    return min(output_limit(spec) or usual, usual)


def open_answers(
    spec: JobSpec,
    data: InputData,
    bytes_per_token: float,
    stored: Stored,
    done_in_order: IntArray,
    default_model: DefaultModel = UNKNOWN_MODEL,
) -> AnswerLengths:
    """What the daemon starts from. `done_in_order` are the rows with a result, as they were sent:
    the latest of them count. Raises DataError when the input cannot be read."""
    column = _answers_in_data(spec, data, bytes_per_token, most_rows=MAX_RESULTS)
    known = [] if column is None else column.tokens[~np.isnan(column.tokens)]
    prior = [round(tokens) for tokens in known] or _of_same_model(spec, stored, default_model)[0]
    store, record = stored
    ended: list[int] = []
    if record is not None:
        latest = done_in_order[-REMEMBERED_ANSWERS:].tolist()
        ended = result_records.answer_tokens(store, record.seq, latest)
    have_own = spec.is_openai_batch or isinstance(spec.request.get("n"), str)
    num = None if have_own else num_choices(spec.request)
    prior = prior or [first_guess(spec)]
    return AnswerLengths(prior, ended, is_guess=column is not None, num_choices=num)


def estimate_outputs(
    spec: JobSpec,
    data: InputData,
    bytes_per_token: float,
    stored: Stored | None = None,
    default_model: DefaultModel = UNKNOWN_MODEL,
    *,
    guesses: bool = False,
) -> OutputEstimate:
    """The best estimate there is, row by row where that is known. With `guesses` it never is
    unknown: in place of a limit it is what the daemon expects of a job that has not begun. Raises
    DataError when the input cannot be read."""
    known = None if stored is None else _returned(spec, stored, default_model)
    known = known or _answers_in_data(spec, data, bytes_per_token)
    if known is not None:
        return known
    limit = output_limit(spec)
    mean: float | None = limit
    source = "unknown" if limit is None else "the limit in the job file"
    earlier, of_job = ([], "") if stored is None else _of_same_model(spec, stored, default_model)
    if spec.endpoint == EMBEDDINGS:
        mean, source = (0, "the endpoint") if guesses else (mean, source)
    elif earlier:
        mean, source = AnswerLengths(earlier).mean_tokens, of_job
    elif guesses and limit != first_guess(spec):
        mean, source = first_guess(spec), "a guess, as nothing says how long they are"
    tokens = np.full(data.num_rows, np.nan if mean is None else float(mean))
    return OutputEstimate(tokens, None if mean is None else float(mean), source)


def _answers_in_data(
    spec: JobSpec, data: InputData, bytes_per_token: float, *, most_rows: int | None = None
) -> OutputEstimate | None:
    """What a column of good answers says, where the job keeps one: the tokens of its texts, and one
    for the end of each, times the choices; NaN where a text is empty. None too where its files have
    it in types that share none. With `most_rows`, about the first rows only. Raises DataError."""
    column = next((name for name in ANSWER_COLUMNS if name in spec.output.keep), None)
    if column is None or column not in data.columns:
        return None
    parts = [np.empty(0)]
    try:
        for first_row, batch in data.iter_batches([column]):
            if most_rows is not None and first_row >= most_rows:
                break
            values = batch.column(0)
            if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
                return None
            parts.append(pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False))
    except MixedTypesError:
        return None
    num_bytes = np.concatenate(parts).astype(np.float64)
    if not num_bytes.any():
        return None
    tokens = np.where(num_bytes > 0, num_bytes / bytes_per_token + 1, np.nan)
    tokens = np.minimum(tokens * num_choices(spec.request), output_limit(spec) or np.inf)
    return OutputEstimate(tokens, float(np.nanmean(tokens)), f"the column {column!r}")


def _returned(spec: JobSpec, stored: Stored, default: DefaultModel) -> OutputEstimate | None:
    """What finished rows returned, and what those to come are expected to; None while none has."""
    store, record = stored
    if record is None:
        return None
    counts = result_records.count(store, record.seq)
    if not counts.num_completed:
        return None
    tokens = np.full(record.num_rows, np.nan)
    source = f"the {counts.num_completed:,} rows that are done"
    if record.results_removed_at is not None:
        return OutputEstimate(tokens, counts.num_output_tokens / counts.num_completed, source)
    for result in result_records.read(store, record.seq, limit=MAX_RESULTS):
        if result.error is None:
            tokens[result.row] = result.usage.num_output_tokens
    mean = result_records.mean_answer_tokens(store, record.seq)
    if counts.num_done < record.num_rows:
        prior = _of_same_model(spec, stored, default)[0] or [first_guess(spec)]
        seen = tokens[tokens > 0].astype(int).tolist()
        mean = AnswerLengths(prior, seen[-REMEMBERED_ANSWERS:]).mean_tokens
    return OutputEstimate(tokens, mean, source)


def _of_same_model(
    spec: JobSpec, stored: Stored, default_model: DefaultModel
) -> tuple[Sequence[int], str]:
    """Answers of the newest other job that asked the same model at the same endpoint, for as many
    choices as this one has and cut at its limit, and whose they are; none where there is no such
    job. Their mean alone, which is a guess, where neither names its model and it is not known
    whether it is the same."""
    store, record = stored
    num, limit = num_choices(spec.request), output_limit(spec) or result_records.MAX_TOKENS
    guess: tuple[Sequence[int], str] = [], ""
    for other in job_records.list_newest(store, MAX_JOBS):
        asked = json.loads(other.spec)
        is_same = (asked.get("model"), asked.get("endpoint")) == (spec.model, spec.endpoint)
        if not is_same or (record is not None and other.id == record.id):
            continue
        tokens = result_records.latest_answer_tokens(store, other.seq, REMEMBERED_ANSWERS)
        if not tokens:
            continue
        num_before = num_choices(asked["request"])
        tokens = [min(-(-each * num // num_before), limit) for each in tokens]
        is_named = spec.model != DEFAULT_MODEL or spec.is_openai_batch
        answered = None if is_named else result_records.answering_model(store, other.seq)
        if is_named or (answered is not None and answered == default_model.name):
            return tokens, f"{other.name}, of the same model"
        if not guess[0] and (answered is None or not default_model.is_sure):
            mean = round(sum(tokens) / len(tokens))
            guess = [mean], f"{other.name}, perhaps of the same model"
    return guess
