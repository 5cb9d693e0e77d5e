"""Made-up token ids: the same text has the same tokens, and no other text has them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]
TokenIds = NDArray[np.uint32]

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 5, 1_996
"""Token ids of prompts: no special token among them."""

ROUNDING = 1e-6

_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58_476D_1CE4_E5B9)),
    (np.uint64(27), np.uint64(0x94D0_49BB_1331_11EB)),
)
_LAST_SHIFT = np.uint64(31)


def mixed(keys: ArrayLike, places: ArrayLike) -> Keys:
    """A number for each key and place (splitmix64): equal where both are, else as if drawn."""
    # Arrays wrap around in silence; scalars would warn.
    value = np.atleast_1d(np.asarray(keys, np.uint64)) + (
        np.atleast_1d(np.asarray(places, np.uint64)) * _STEP
    )
    for shift, factor in _MIX:
        value = (value ^ (value >> shift)) * factor
    numbers: Keys = value ^ (value >> _LAST_SHIFT)
    return numbers


def prompt_of(chain: Keys, chunk_tokens: float, num_tokens: int, own_key: int) -> TokenIds:
    """The tokens of a prompt whose leading chunks have the keys of `chain`.

    Prompts with equal leading keys have equal leading tokens, `chunk_tokens` for each; what comes
    behind the last key is the prompt's own, by `own_key`.
    """
    places = np.arange(num_tokens, dtype=np.uint64)
    keys = np.full(num_tokens, own_key, np.uint64)
    covered = min(num_tokens, shared_tokens(len(chain), chunk_tokens))
    numbers = (places[:covered] / chunk_tokens).astype(np.int64)
    keys[:covered] = chain[np.minimum(numbers, len(chain) - 1)]
    return (mixed(keys, places) % np.uint64(NUM_TOKEN_IDS)).astype(np.uint32) + np.uint32(
        FIRST_TOKEN_ID
    )


def shared_tokens(num_chunks: int, chunk_tokens: float) -> int:
    """Whole tokens in so many chunks."""
    return int(num_chunks * chunk_tokens + ROUNDING)


def key_of(key: int, place: int) -> int:
    """`mixed` of one pair."""
    return int(mixed(key, place)[0])
