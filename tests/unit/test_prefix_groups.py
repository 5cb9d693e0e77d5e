"""Prefix groups: the rows of one key portion, and not all that begin with one system prompt."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from job_builders import make_active_job

from batchrun.daemon.job import ActiveJob
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.offline_jobs import JobTerms, job_of_plan

NUM_ENGINES = 4
NUM_DOCUMENTS = 60
ROWS_EACH = 12
SYSTEM_PROMPT = "You answer questions about the text below. ".ljust(475, ".")


def text_of(number: int, num_bytes: int) -> str:
    """Text that no other number has."""
    return random.Random(number).randbytes(num_bytes // 2 + 1).hex()[:num_bytes]


def questions_about_documents(system_prompt: str) -> list[str]:
    """Rows about one document after the other, so that those of one stand far apart."""
    documents = [system_prompt + text_of(i, 6_000) for i in range(NUM_DOCUMENTS)]
    return [
        f"{document}\nQuestion {number}: {text_of(1_000 + number, 100)}"
        for number in range(ROWS_EACH)
        for document in documents
    ]


def first_waves(job: ActiveJob) -> list[Counter[int]]:
    """The groups of the rows that each of four engines gets before any has ended."""
    feed = RowFeed([job_of_plan(job.spec, job.plan, JobTerms())], [16] * NUM_ENGINES, 0)
    for tick in range(400):
        feed.send(tick / 10)
    waves: list[Counter[int]] = [Counter() for _ in range(NUM_ENGINES)]
    for sent in feed.sent.values():
        waves[sent.engine][int(job.group_of[sent.row])] += 1
    return waves


@pytest.fixture(scope="module")
def instructed(tmp_path_factory: pytest.TempPathFactory) -> ActiveJob:
    """3,000 rows that begin with an instruction of some 2,000 tokens, and share nothing else."""
    instruction = text_of(0, 8_000)
    texts = [instruction + text_of(i, 200) for i in range(1, 3_001)]
    return make_active_job(tmp_path_factory.mktemp("instructed"), texts)


@pytest.mark.parametrize("system_prompt", ["", SYSTEM_PROMPT], ids=["none", "475 bytes"])
def test_a_system_prompt_makes_no_group_of_the_documents_behind_it(
    system_prompt: str, tmp_path: Path
) -> None:
    job = make_active_job(tmp_path, questions_about_documents(system_prompt))

    sizes = Counter(job.group_of.tolist())
    assert job.plan.num_groups == len(sizes) == NUM_DOCUMENTS
    assert set(sizes.values()) == {ROWS_EACH}
    assert set(job.group_of[:NUM_DOCUMENTS].tolist()) == set(range(NUM_DOCUMENTS))

    waves = first_waves(job)
    totals = [wave.total() for wave in waves]
    assert sum(totals) == NUM_DOCUMENTS * ROWS_EACH
    assert max(totals) - min(totals) <= 2 * ROWS_EACH
    assert sum(map(len, waves)) <= NUM_DOCUMENTS + 2 * NUM_ENGINES


def test_an_instruction_that_all_rows_share_is_not_one_group(instructed: ActiveJob) -> None:
    sizes = Counter(instructed.group_of.tolist())

    assert len(sizes) == 24
    assert max(sizes.values()) - min(sizes.values()) <= 1
    totals = [wave.total() for wave in first_waves(instructed)]
    assert max(totals) - min(totals) <= 10


def test_a_document_with_some_questions_is_one_group_however_they_share_beginnings(
    tmp_path: Path,
) -> None:
    document, kinds = text_of(0, 20_000), [text_of(i, 2_000) for i in range(1, 4)]
    texts = [document + kinds[i % 3] + text_of(10 + i, 300) for i in range(18)]
    job = make_active_job(tmp_path, [*texts, text_of(99, 5_000)])

    assert Counter(job.group_of.tolist()) == {0: 18, 1: 1}
    assert job.plan.num_groups == 1
