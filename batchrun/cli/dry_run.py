"""`submit --dry-run`: a submission's checks and what would come of it; nothing is left behind."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchrun.cli.console import LateProgress
from batchrun.cli.dry_run_figures import Forecast, Foretold, Price, study_figures
from batchrun.cli.dry_run_measured import measured
from batchrun.cli.inspect_figures import Inspected
from batchrun.cli.inspect_kv import find_kv_size
from batchrun.cli.inspect_outputs import OutputEstimate, answers_in_data, output_limit
from batchrun.cli.inspect_study import KvSize, study_job
from batchrun.cli.vllm_here import vllm_needed
from batchrun.config import Deployment, load_deployment
from batchrun.daemon.profiles import existing_profile
from batchrun.errors import EngineError, InputError
from batchrun.home import Home
from batchrun.inputs import InputData
from batchrun.inputs.prompts import read_prompts
from batchrun.jobspec import JobSpec, load_job_file
from batchrun.submission import checked_job
from batchrun.types import USUAL_OUTPUT_TOKENS, ProgressSink

if TYPE_CHECKING:
    from batchrun.cli.dry_run_simulated import Simulation

EMBEDDINGS = "/v1/embeddings"
NOTHING_TO_RUN = Forecast.unknown("no row can run", "no row can run")


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the user says of the load and the engines: `--trace`, `--profile` and `--price`."""

    trace: Path | None = None
    profile: str | None = None
    price: str | None = None


def foretell(file: Path, home: Home, assumed: Assumed) -> Foretold:
    """What would become of a job file. Makes no file, folder or store.

    Raises what `submit` raises for the same file; InputError, ConfigError and EngineError where
    what is assumed cannot be used.
    """
    with LateProgress() as progress:
        spec = load_job_file(file, cwd=Path.cwd())
        home.check()
        deployment = load_deployment(None)
        asked = _asked_simulation(assumed, deployment, home)
        price = _price(assumed, asked)
        if asked is None or assumed.profile is None:
            kv = find_kv_size(None, deployment, home)
        else:
            kv = asked.kv
        inspected, figures = _studied(spec, kv, deployment.model_folder(home), progress)
        known = _measured(home, spec, figures, assumed)
        simulation = asked
        if asked is None and known.eta.source is None:
            simulation = _own_simulation(deployment, home)
        computed_tokens = figures["computed_tokens"]
        forecast = _forecast(simulation, inspected, computed_tokens, known, progress)
    return Foretold(figures, spec.deadline_s, forecast, price)


def _asked_simulation(assumed: Assumed, deployment: Deployment, home: Home) -> Simulation | None:
    if assumed.trace is None and assumed.profile is None:
        return None
    with vllm_needed("submit --dry-run with --trace or --profile"):
        from batchrun.cli.dry_run_simulated import simulation_of
    found = simulation_of(assumed.trace, assumed.profile, deployment, home)
    if found is None:
        raise InputError(
            f"--trace: engine {deployment.engines[0].name} has no profile yet; run `batchrun "
            "calibrate`, or name one with --profile"
        )
    return found


def _own_simulation(deployment: Deployment, home: Home) -> Simulation | None:
    """Of the profile of the deployment's first engine, where there is one and vLLM is here."""
    if existing_profile(deployment, deployment.engines[0], home) is None:
        return None
    try:
        with vllm_needed("submit --dry-run"):
            from batchrun.cli.dry_run_simulated import simulation_of
    except EngineError:
        return None
    return simulation_of(None, None, deployment, home)


def _price(assumed: Assumed, simulation: Simulation | None) -> Price:
    given = Price() if simulation is None else simulation.price
    if assumed.price is None:
        return given
    if given.per_gpu_hour is not None:
        raise InputError(f"--price {assumed.price}: --profile has a price already")
    return Price.parse(assumed.price)


def _studied(
    spec: JobSpec, kv: KvSize, model_folder: Path | None, progress: ProgressSink
) -> tuple[Inspected, dict[str, Any]]:
    """The job's study, and the figures that are printed. Checks all that a submission checks."""
    with checked_job(spec, scratch=Path(tempfile.gettempdir()), progress=progress) as given:
        data, template = given
        prompts = read_prompts(model_folder, now=datetime.now().astimezone())
        job = study_job(spec, data, template, prompts, progress)
        outputs = expected_outputs(spec, data, job.counted.bytes_per_token)
        inspected = Inspected(spec, job, outputs, kv)
        figures = inspected.figures()
    output_tokens = float(outputs.filled[job.tree.rows].sum())
    return inspected, study_figures(figures, figures["prompt_tokens_total"], output_tokens)


def expected_outputs(spec: JobSpec, data: InputData, bytes_per_token: float) -> OutputEstimate:
    """What the data says of the answers, else what the daemon expects of a job that has not begun.

    Raises DataError when the input cannot be read.
    """
    in_data = answers_in_data(spec, data, bytes_per_token)
    if in_data is not None:
        return in_data
    limit, mean = output_limit(spec), float(USUAL_OUTPUT_TOKENS)
    source = "a guess, as nothing says how long they are"
    if spec.endpoint == EMBEDDINGS:
        mean, source = 0.0, "the endpoint"
    elif limit is not None and limit <= USUAL_OUTPUT_TOKENS:
        mean, source = float(limit), "the limit in the job file"
    return OutputEstimate(np.full(data.num_rows, mean), mean, source)


def _measured(home: Home, spec: JobSpec, figures: dict[str, Any], assumed: Assumed) -> Forecast:
    """By the daemon's pace, which a trace stands in for."""
    if figures["rows_that_cannot_run"] == figures["rows"]:
        return NOTHING_TO_RUN
    if assumed.trace is not None:
        return Forecast.unknown("", "")
    return measured(home, figures["computed_tokens"], spec.weight)


def _forecast(
    simulation: Simulation | None,
    inspected: Inspected,
    computed_tokens: int,
    known: Forecast,
    progress: ProgressSink,
) -> Forecast:
    """The simulated one where there is a simulation, else what is known without."""
    if simulation is None or known is NOTHING_TO_RUN:
        return known
    job = simulation.job(inspected.spec, inspected.job.plan, inspected.outputs)
    if not job.num_rows:
        return NOTHING_TO_RUN
    return simulation.forecast(job, computed_tokens, known.eta, progress)
