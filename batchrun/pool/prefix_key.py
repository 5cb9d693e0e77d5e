"""Prefix keys without tokenising.

Equal leading text gives equal leading tokens up to the last few, so a chain of hashes over chunks
of the text stands in for the engine's chain of hashes over blocks of tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

CHUNK_BYTES = 256


def salt_of(*parts: str) -> int:
    """A seed from what separates KV caches besides the text: model, LoRA name, cache salt."""
    return xxhash.xxh3_64_intdigest("\x00".join(parts).encode())


def chunk_chain(text: bytes, salt: int) -> npt.NDArray[np.uint64]:
    """Hashes of the full chunks of `text`, each chained to the one before.

    Two texts with equal element i share at least their first (i + 1) * CHUNK_BYTES bytes. A last
    chunk shorter than CHUNK_BYTES has no element, as a partly filled KV block has no hash.
    """
    num_chunks = len(text) // CHUNK_BYTES
    chain = np.empty(num_chunks, dtype=np.uint64)
    view = memoryview(text)
    key = salt
    for i in range(num_chunks):
        key = xxhash.xxh3_64_intdigest(view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES], key)
        chain[i] = key
    return chain
