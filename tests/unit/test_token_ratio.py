"""Tokens estimated from bytes, and the cached tokens that are predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from batchrun.errors import ConfigError
from batchrun.jobs.prompts.tokens import (
    DEFAULT_BYTES_PER_TOKEN,
    ENOUGH_ROWS,
    SAMPLE_BYTES,
    SAMPLE_ROWS,
    CacheAgreement,
    TokenRatio,
    predict_cached_in_row,
    sample_rows,
    token_counter,
)


@pytest.fixture
def words_file(tmp_path: Path) -> Path:
    """A tokenizer for which a word is a token; it would cut texts off after two of them."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_sample_sets_the_ratio(words_file: Path) -> None:
    ratio = TokenRatio.sampled([b"four word text here", b"\xc3\xa9"], token_counter(words_file))
    assert ratio.bytes_per_token == (19 + 2) / 5
    assert ratio.estimate_tokens(210) == 50


def test_a_long_text_is_sampled_at_its_beginning(words_file: Path) -> None:
    text = b"abc " * SAMPLE_BYTES + "é".encode() * SAMPLE_BYTES
    assert TokenRatio.sampled([text], token_counter(words_file)).bytes_per_token == 4.0


def test_without_a_tokenizer_the_ratio_is_a_guess(tmp_path: Path) -> None:
    counter = token_counter(tmp_path / "tokenizer.json")
    ratio = TokenRatio.sampled([b"text"], counter)
    assert counter is None and ratio.bytes_per_token == DEFAULT_BYTES_PER_TOKEN
    assert ratio.estimate_tokens(0) == 1


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a tokenizer"):
        token_counter(path)


def test_counts_of_the_engine_correct_the_guess() -> None:
    ratio = TokenRatio()
    ratio.correct(200, 100)
    assert (ratio.bytes_per_token, ratio.mape) == (2.0, 0.5)
    ratio.correct(200, 100)
    assert (ratio.bytes_per_token, ratio.mape) == (2.0, 0.25)


def test_counts_join_a_sample(words_file: Path) -> None:
    ratio = TokenRatio.sampled([b"one two three four"], token_counter(words_file))
    ratio.correct(82, 6)
    assert ratio.bytes_per_token == 10.0


def test_a_row_without_text_or_count_corrects_nothing() -> None:
    ratio = TokenRatio()
    ratio.correct(0, 10)
    ratio.correct(10, 0)
    assert (ratio.bytes_per_token, ratio.num_corrections) == (DEFAULT_BYTES_PER_TOKEN, 0)


SIZES = st.integers(100, 10**6)


@given(st.lists(SIZES, min_size=2, max_size=20), st.floats(1.0, 8.0))
def test_a_job_with_one_ratio_is_estimated_well_after_one_row(
    sizes: list[int], bytes_per_token: float
) -> None:
    ratio = TokenRatio()
    for size in sizes:
        ratio.correct(size, max(1, round(size / bytes_per_token)))
    # Whole tokens: a text of 100 bytes has 12.5 tokens or more, so each rounding is within 1/25.
    assert ratio.bytes_per_token == pytest.approx(bytes_per_token, rel=0.05)


@given(st.integers(0, 10**6))
def test_sample_rows_spread_over_the_job(num_rows: int) -> None:
    rows = sample_rows(num_rows)
    assert len(rows) == min(num_rows, SAMPLE_ROWS) == len(set(rows.tolist()))
    if num_rows:
        gaps = np.diff(np.append(rows, num_rows))
        assert rows[0] == 0 and gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(("shared_chunks", "cached_tokens"), [(0, 0), (1, 96), (4, 288)])
def test_whole_blocks_of_the_shared_text_are_predicted(
    shared_chunks: int, cached_tokens: int
) -> None:
    # Four bytes to a token: a chunk has 64 tokens, and half of the next one is assumed.
    assert predict_cached_in_row(shared_chunks, 2_000, 500, block_tokens=32) == cached_tokens


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(256, 240), (257, 256)])
def test_the_last_token_of_a_prompt_is_never_cached(num_tokens: int, cached_tokens: int) -> None:
    found = predict_cached_in_row(4, 4 * num_tokens, num_tokens, block_tokens=16)
    assert found == cached_tokens


def test_agreement_is_the_smaller_sum_over_the_larger() -> None:
    agreement = CacheAgreement()
    assert agreement.share == 1.0
    agreement.add(100, 200)
    agreement.add(60, 0)
    assert agreement.share == 0.8


@pytest.mark.parametrize(
    ("num_rows", "cached", "warns"),
    [(ENOUGH_ROWS, 89, True), (ENOUGH_ROWS, 91, False), (ENOUGH_ROWS - 1, 0, False)],
)
def test_poor_agreement_warns_once_enough_rows_are_in(
    num_rows: int, cached: int, *, warns: bool
) -> None:
    agreement = CacheAgreement()
    for _ in range(num_rows):
        agreement.add(100, cached)
    assert agreement.warns is warns
