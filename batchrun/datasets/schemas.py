"""The columns of each data set: the same for generated samples and imported real files."""

from __future__ import annotations

import pyarrow as pa

from batchrun.errors import InputError


def _texts(*names: str) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string(), nullable=False) for name in names])


SCHEMAS = {
    "loogle": _texts("id", "document_id", "title", "document", "question", "answer", "task"),
    "toolbench": _texts("id", "system", "tools", "query", "answer"),
    "nextqa": _texts("id", "video_id", "video", "question", "a0", "a1", "a2", "a3", "a4", "answer"),
}
DATASET_NAMES = tuple(SCHEMAS)


def schema_of(name: str) -> pa.Schema:
    """The schema of the data set `name`; InputError for a name that is not in DATASET_NAMES."""
    if name not in SCHEMAS:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(DATASET_NAMES)}")
    return SCHEMAS[name]
