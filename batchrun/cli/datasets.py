"""The `datasets` commands: generated samples and importers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from batchrun.cli.console import LateProgress, print_json, say
from batchrun.cli.options import JsonOption
from batchrun.datasets import WrittenDataset, import_dataset, write_sample

app = typer.Typer(
    help="Generate sample data sets, or import the real ones.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


class DatasetName(StrEnum):
    """The data sets there are."""

    LOOGLE = "loogle"
    TOOLBENCH = "toolbench"
    NEXTQA = "nextqa"


NameArgument = Annotated[DatasetName, typer.Argument(help="Which data set.")]


class SampleScale(StrEnum):
    """How large a sample is."""

    SMALL = "small"
    FULL = "full"


@app.command()
def sample(
    name: NameArgument,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. [default: NAME.parquet]")
    ] = None,
    scale: Annotated[
        SampleScale, typer.Option("--scale", help="small: for a CPU; full: the published sizes.")
    ] = SampleScale.SMALL,
    rows: Annotated[int | None, typer.Option("--rows", help="Number of rows.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal rows.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a sample of our own text in the shape of the real data set."""
    with LateProgress() as progress:
        written = write_sample(
            name.value,
            output or Path(f"{name.value}.parquet"),
            scale=scale.value,
            rows=rows,
            seed=seed,
            progress=progress,
        )
    _report(written, as_json=as_json)


@app.command("import")
def import_(
    name: NameArgument,
    source: Annotated[Path, typer.Argument(help="Folder with the data set's own files.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. [default: NAME.parquet]")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Keep only the first rows.")] = None,
    video_tokens: Annotated[
        int, typer.Option("--video-tokens", help="nextqa: length of a long video's stand-in.")
    ] = 512,
    as_json: JsonOption = False,
) -> None:
    """Turn the real data set's files into one Parquet file that the job files read."""
    with LateProgress() as progress:
        written = import_dataset(
            name.value,
            source,
            output or Path(f"{name.value}.parquet"),
            limit=limit,
            video_tokens=video_tokens,
            progress=progress,
        )
    _report(written, as_json=as_json)


def _report(written: WrittenDataset, *, as_json: bool) -> None:
    if as_json:
        document = {"path": str(written.path), "rows": written.num_rows}
        print_json({**document, "size_bytes": written.size_bytes})
    else:
        say(f"{written.path}: {written.num_rows:,} rows, {written.size_bytes / 1e6:.1f} MB")
