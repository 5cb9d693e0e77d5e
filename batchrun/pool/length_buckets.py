"""Length buckets of prefix groups (Echo, section 6): batches of prompts of like length.

A group, not a row, belongs to a bucket, by its median length: a bound would otherwise split the
rows of one document over two trees, and each would compute the document.
"""

from __future__ import annotations

import numpy as np

from batchrun.pool.chains import IntArray


def bucket_of_groups(groups: IntArray, lengths: IntArray, num_buckets: int) -> IntArray:
    """For each group, numbered from 0 without gaps, its bucket: 0 to `num_buckets` - 1.

    `groups[i]` and `lengths[i]` are of row i. Buckets are half-open and geometric between the
    smallest and the largest median.
    """
    if not len(groups):
        return np.empty(0, dtype=np.int64)
    sizes = np.bincount(groups)
    ordered = lengths[np.lexsort((lengths, groups))]
    medians = ordered[np.cumsum(sizes) - sizes + sizes // 2] + 1.0
    span = np.log(medians.max() / medians.min())
    if num_buckets == 1 or span == 0:
        return np.zeros(len(sizes), dtype=np.int64)
    place = np.log(medians / medians.min()) / span
    buckets: IntArray = np.minimum((place * num_buckets).astype(np.int64), num_buckets - 1)
    return buckets
