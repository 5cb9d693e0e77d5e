"""The `inspect` command: what a job would do, before it does it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from batchrun.cli.console import LateProgress, note, out, print_json
from batchrun.cli.inspect_figures import Inspected
from batchrun.cli.inspect_kv import find_kv_size
from batchrun.cli.inspect_outputs import estimate_outputs
from batchrun.cli.inspect_page import write_page
from batchrun.cli.inspect_study import study_job
from batchrun.cli.inspect_view import rendered
from batchrun.cli.options import HomeOption, JsonOption
from batchrun.cli.results import stored_job
from batchrun.config import load_deployment, load_home
from batchrun.errors import InputError
from batchrun.home import Home
from batchrun.inputs import (
    InputData,
    RequestTemplate,
    check_columns,
    check_ids,
    fetched_input,
    open_input,
)
from batchrun.inputs.prompts import read_prompts
from batchrun.jobspec import JobSpec, load_job_file
from batchrun.store import JobRecord, Store
from batchrun.submission import open_submitted
from batchrun.types import ProgressSink

JOB_FILE_SUFFIXES = (".yaml", ".yml")

Stored = tuple[Store, JobRecord]


def inspect(
    target: Annotated[str, typer.Argument(help="Job file (YAML) or job id.")],
    *,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens", min=1, help="Tokens of KV that an engine has, for the hit rate."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also draw the distributions, as one HTML file.")
    ] = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Study a job's prompts: lengths, shared prefixes, hit rates, and the order of a run."""
    if html is not None and not html.absolute().parent.is_dir():
        raise InputError(f"--html {html}: there is no folder {html.parent}")
    home = load_home(home_path)
    with LateProgress() as progress, _opened(target, home, progress) as (spec, data, stored):
        inspected = _inspected(spec, data, stored, home, kv_tokens, progress)
        figures = inspected.figures()
    shown = inspected.distributions()
    if html is not None:
        write_page(html, figures, shown)
        note(f"distributions drawn in {html}")
    if as_json:
        print_json(figures)
    else:
        out.print(rendered(figures, shown))


@contextmanager
def _opened(
    target: str, home: Home, progress: ProgressSink
) -> Iterator[tuple[JobSpec, InputData, Stored | None]]:
    """A job file's input as it is, or a submitted job's as it was, with what is stored of it."""
    if target.endswith(JOB_FILE_SUFFIXES):
        spec = load_job_file(Path(target), cwd=Path.cwd())
        folder = Path(tempfile.gettempdir())
        with fetched_input(spec.input, folder, progress) as (given, _), open_input(given) as data:
            yield spec, data, None
        return
    with stored_job(target, home) as (store, record):
        spec = JobSpec.model_validate_json(record.spec)
        with open_submitted(record, spec, links=home.inputs) as data:
            yield spec, data, (store, record)


def _inspected(
    spec: JobSpec,
    data: InputData,
    stored: Stored | None,
    home: Home,
    kv_tokens: int | None,
    progress: ProgressSink,
) -> Inspected:
    template = RequestTemplate(spec, data.columns, model=spec.model)
    check_columns(spec, data)
    check_ids(data, progress=progress)
    deployment = load_deployment(None)
    kv = find_kv_size(kv_tokens, deployment, home)
    prompts = read_prompts(deployment.model_folder(home), now=datetime.now().astimezone())
    job = study_job(spec, data, template, prompts, progress)
    outputs = estimate_outputs(spec, data, stored, job.counted.bytes_per_token)
    return Inspected(spec, job, outputs, kv)
