"""The `inspect` command: what a job would do, before it does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from batchrun.cli.console import LateProgress, out, print_json
from batchrun.cli.options import HomeOption, JsonOption
from batchrun.cli.results import stored_job
from batchrun.config import load_home
from batchrun.home import Home
from batchrun.inputs import InputData, RequestTemplate, check_columns, check_ids, open_input
from batchrun.jobspec import JobSpec, load_job_file
from batchrun.planning import BYTES_PER_TOKEN, JobPlan, plan_job
from batchrun.submission import open_submitted
from batchrun.types import ProgressSink

JOB_FILE_SUFFIXES = (".yaml", ".yml")


def inspect(
    target: Annotated[str, typer.Argument(help="Job file (YAML) or job id.")],
    *,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job's rows, tokens and shared prefixes, and what a run would do."""
    with LateProgress() as progress:
        spec, plan = _plan(target, load_home(home_path), progress)
    study = _study(spec, plan)
    if as_json:
        print_json(study)
        return
    table = Table(box=None, show_header=False)
    for key, value in _described(study).items():
        table.add_row(key, Text(value, overflow="fold"))
    out.print(table)


def _plan(target: str, home: Home, progress: ProgressSink) -> tuple[JobSpec, JobPlan]:
    if target.endswith(JOB_FILE_SUFFIXES):
        spec = load_job_file(Path(target), cwd=Path.cwd())
        data = open_input(spec.input)
    else:
        with stored_job(target, home) as (_, record):
            spec = JobSpec.model_validate_json(record.spec)
            data = open_submitted(record, spec, links=home.inputs)
    try:
        return spec, _plan_checked(spec, data, progress)
    finally:
        data.close()


def _plan_checked(spec: JobSpec, data: InputData, progress: ProgressSink) -> JobPlan:
    template = RequestTemplate(spec, data.columns, model=spec.model)
    check_columns(spec, data)
    check_ids(data, progress=progress)
    return plan_job(spec, data, template, progress)


def _study(spec: JobSpec, plan: JobPlan) -> dict[str, Any]:
    tokens = plan.text_bytes / BYTES_PER_TOKEN
    max_tokens = spec.request.get("max_tokens", spec.request.get("max_completion_tokens"))
    return {
        "name": spec.name,
        "endpoint": spec.endpoint,
        "rows": plan.num_rows,
        "rows_with_template_errors": len(plan.errors),
        "prompt_tokens_estimated": int(tokens.sum()),
        "prompt_tokens_mean": float(tokens.mean()),
        "prompt_tokens_std": float(np.std(tokens)),
        "shared_share": plan.shared_share,
        "prefix_groups": plan.num_groups,
        "max_output_tokens": max_tokens if isinstance(max_tokens, int) else None,
        "first_rows": plan.order.rows[:10].tolist(),
        "output_path": spec.output.path,
        "first_error": next((f"row {row}: {e.message}" for row, e in plan.errors.items()), None),
    }


def _described(study: dict[str, Any]) -> dict[str, str]:
    computed = study["prompt_tokens_estimated"] * (1 - study["shared_share"])
    lines = {
        "job": f"{study['name']}, {study['endpoint']}",
        "rows": f"{study['rows']:,}",
        "prompt": f"about {study['prompt_tokens_estimated']:,} tokens in all, "
        f"{study['prompt_tokens_mean']:,.0f} ± {study['prompt_tokens_std']:,.0f} a row "
        f"(estimated at {BYTES_PER_TOKEN:g} bytes a token)",
        "shared": f"{study['shared_share']:.0%} of it is a prefix that an earlier row holds, in "
        f"{study['prefix_groups']:,} groups of rows",
        "a run": f"computes about {computed:,.0f} prompt tokens, the groups one after the other; "
        f"first rows: {', '.join(map(str, study['first_rows']))}",
        "output": f"{study['output_path']}",
    }
    if study["max_output_tokens"] is not None:
        lines["answers"] = f"at most {study['max_output_tokens']:,} tokens each"
    if study["rows_with_template_errors"]:
        lines["errors"] = (
            f"rows that cannot be rendered and will fail: {study['rows_with_template_errors']:,}; "
            f"first: {study['first_error']}"
        )
    return lines
