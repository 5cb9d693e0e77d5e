"""Write a generated data set: text of our own in the shape of the real one."""

from __future__ import annotations

from pathlib import Path

from batchrun.datasets.loogle_sample import loogle_rows
from batchrun.datasets.nextqa_sample import nextqa_rows
from batchrun.datasets.plan import SamplePlan, plan_sample
from batchrun.datasets.schemas import schema_of
from batchrun.datasets.shapes import SHAPES, Scale
from batchrun.datasets.texts import TextSource
from batchrun.datasets.toolbench_sample import toolbench_rows
from batchrun.datasets.writer import ProgressReport, WrittenDataset, write_rows
from batchrun.errors import InputError
from batchrun.types import ProgressSink

ROW_MAKERS = {"loogle": loogle_rows, "toolbench": toolbench_rows, "nextqa": nextqa_rows}
DEFAULT_SEED = 1


def write_sample(
    name: str,
    path: Path,
    *,
    scale: Scale = "small",
    rows: int | None = None,
    seed: int = DEFAULT_SEED,
    progress: ProgressSink | None = None,
) -> WrittenDataset:
    """Write a generated sample of the data set `name` to the Parquet file `path`.

    `scale` "full" has the sizes of Preble's table 1, "small" is for a CPU; `rows` changes the
    number of rows and leaves their lengths. The same arguments give the same rows. Memory does
    not grow with the size of the file. Raises InputError.
    """
    schema = schema_of(name)
    plan = sample_plan(name, scale=scale, rows=rows, seed=seed)
    made = ROW_MAKERS[name](plan, TextSource(seed))
    report = ProgressReport(progress, len(plan.tail_tokens))
    return write_rows(path, schema, made, report=report)


def sample_plan(name: str, *, scale: Scale, rows: int | None, seed: int) -> SamplePlan:
    """The sizes of the rows that `write_sample` with the same arguments writes."""
    schema_of(name)
    if (name, scale) not in SHAPES:
        raise InputError(f"unknown scale {scale!r}: choose small or full")
    if rows is not None and rows < 1:
        raise InputError(f"rows: {rows} is not a number of rows; give 1 or more")
    shape = SHAPES[name, scale]
    return plan_sample(shape, num_rows=rows or shape.num_rows, seed=seed)
