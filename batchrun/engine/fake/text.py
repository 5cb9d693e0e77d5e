"""Deterministic tokens: the fake engine's tokenizer, its prefix cache and its prose."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16
_TOKEN = re.compile(r"\s?\w{1,6}|\s|[^\w\s]")
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "kelp", "lagoon")
_MIN_ANSWER_TOKENS = 4
_ANSWER_SPREAD_TOKENS = 28


def tokenize(text: str) -> list[str]:
    """Tokens of a text; joined they give the text again, or nearly so."""
    return _TOKEN.findall(text)


def hash_prompt(tokens: Sequence[str], seed: object = None) -> str:
    """A short hash of a prompt and, if given, of a sampling seed."""
    return hashlib.sha256(repr((list(tokens), seed)).encode("utf-8", "replace")).hexdigest()[:16]


def natural_length_tokens(prompt_hash: str) -> int:
    """How many tokens the answer to a prompt has when nothing cuts it short."""
    return _MIN_ANSWER_TOKENS + int(prompt_hash[:8], 16) % _ANSWER_SPREAD_TOKENS


def write_tokens(prompt_hash: str, choice: int, num_tokens: int) -> list[str]:
    """The first `num_tokens` tokens of the answer; a longer answer starts with a shorter one."""
    words = [_word(f"{prompt_hash}/{choice}/{position}") for position in range(num_tokens)]
    return [word if position == 0 else f" {word}" for position, word in enumerate(words)]


def _word(key: str) -> str:
    return _WORDS[hashlib.sha256(key.encode()).digest()[0] % len(_WORDS)]


class PrefixCache:
    """Whole blocks of prompts seen before, found by chained hash; the oldest goes first."""

    def __init__(self, capacity_blocks: int) -> None:
        """`capacity_blocks` blocks of `BLOCK_TOKENS` tokens are kept."""
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, tokens: Sequence[str]) -> int:
        """Count the leading tokens that were cached, then cache the whole prompt.

        As in vLLM the last token is always computed, so a full hit leaves one block out.
        """
        hashes = _block_hashes(tokens)
        usable = hashes[: max(0, len(tokens) - 1) // BLOCK_TOKENS]
        num_hits = next(
            (index for index, key in enumerate(usable) if key not in self._blocks), len(usable)
        )
        for key in reversed(hashes):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity_blocks:
            self._blocks.popitem(last=False)
        return num_hits * BLOCK_TOKENS


def _block_hashes(tokens: Sequence[str]) -> list[bytes]:
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = "\0".join(tokens[start : start + BLOCK_TOKENS])
        parent = hashlib.sha256(parent + block.encode("utf-8", "replace")).digest()
        hashes.append(parent)
    return hashes
