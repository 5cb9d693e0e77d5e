"""`submit --dry-run`: a submission's checks and what would come of it; nothing is left behind."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from batchrun.cli.client import DaemonClient
from batchrun.cli.console import LateProgress, vllm_needed
from batchrun.cli.deployment import read_deployment
from batchrun.cli.inspect import find_kv_size
from batchrun.config import Deployment
from batchrun.daemon.plugin import existing_profile
from batchrun.errors import DaemonUnavailableError, EngineError, InputError
from batchrun.home import Home
from batchrun.jobs.figures import Inspected
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import KvSize, OutputEstimate, answers_in_data, output_limit, study_job
from batchrun.jobs.submit import checked_job
from batchrun.quantities import count, duration
from batchrun.simulator.planner.job_forecast import (
    HOUR_S,
    EngineTime,
    Eta,
    Forecast,
    Prediction,
    Price,
    study_figures,
)
from batchrun.types import USUAL_OUTPUT_TOKENS, ProgressSink

if TYPE_CHECKING:
    from batchrun.simulator.planner.simulated_fleet import SimulatedFleet


NO_DAEMON = (
    "no daemon runs; one that has run offline work knows the pace, and --trace TRACE simulates it "
    "beside recorded calls"
)
NO_PACE = (
    "the daemon has seen no offline work yet; once rows have run it knows the pace, and "
    "--trace TRACE simulates it beside recorded calls"
)
NO_COST = "--profile PROFILE simulates it on an engine of its own"


def measured(home: Home, computed_tokens: int, weight: float) -> Forecast:
    """What the daemon predicts for so much work, by the pace that it has measured; unknown where
    no daemon runs, or has run nothing yet."""
    work = {"computed_tokens": computed_tokens, "weight": weight}
    daemon = DaemonClient(home)
    try:
        answer = daemon.post("/foretell", work)
        is_offline_on = daemon.get("/status")["offline"]
    except DaemonUnavailableError:
        return Forecast.unknown(NO_DAEMON, NO_COST)
    eta, tokens_per_s = answer["eta"], answer["computed_tokens_per_s"]
    if eta is None or not tokens_per_s:
        return Forecast.unknown(NO_PACE, NO_COST)
    num_engines = answer["num_engines"]
    rests_on = (
        f"{tokens_per_s:,.0f} computed tokens/s, measured over the last "
        f"{duration(answer['seen_s'])} on {count(num_engines, 'engine')}; "
        f"{count(answer['num_running_jobs'], 'job')} running now"
    )
    if not is_offline_on:
        rests_on += "; offline work is switched off, and waits until it is on again"
    hours = computed_tokens / tokens_per_s * num_engines / HOUR_S
    return Forecast(
        Eta(eta["expected_s"], eta["low_s"], eta["high_s"], "daemon", rests_on),
        EngineTime(hours, "daemon", "at the pace measured beside the calls"),
    )


EMBEDDINGS = "/v1/embeddings"
NOTHING_TO_RUN = Forecast.unknown("no row can run", "no row can run")


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the user says of the load and the engines: `--trace`, `--profile` and `--price`."""

    trace: Path | None = None
    profile: str | None = None
    price: str | None = None


def predict(file: Path, home: Home, assumed: Assumed) -> Prediction:
    """What would become of a job file. Makes no file, folder or store.

    Raises what `submit` raises for the same file; InputError, ConfigError and EngineError where
    what is assumed cannot be used.
    """
    with LateProgress() as progress:
        spec = load_job_file(file, cwd=Path.cwd())
        home.check()
        deployment = read_deployment(None)
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
    return Prediction(figures, spec.deadline_s, forecast, price)


def _asked_simulation(
    assumed: Assumed, deployment: Deployment, home: Home
) -> SimulatedFleet | None:
    if assumed.trace is None and assumed.profile is None:
        return None
    with vllm_needed("submit --dry-run with --trace or --profile"):
        from batchrun.simulator.planner.simulated_fleet import simulation_of
    found = simulation_of(assumed.trace, assumed.profile, deployment, home)
    if found is None:
        raise InputError(
            f"--trace: engine {deployment.engines[0].name} has no profile yet; run `batchrun "
            "calibrate`, or name one with --profile"
        )
    return found


def _own_simulation(deployment: Deployment, home: Home) -> SimulatedFleet | None:
    """Of the profile of the deployment's first engine, where there is one and vLLM is here."""
    if existing_profile(deployment, deployment.engines[0], home) is None:
        return None
    try:
        with vllm_needed("submit --dry-run"):
            from batchrun.simulator.planner.simulated_fleet import simulation_of
    except EngineError:
        return None
    return simulation_of(None, None, deployment, home)


def _price(assumed: Assumed, simulation: SimulatedFleet | None) -> Price:
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
    simulation: SimulatedFleet | None,
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


def rendered(found: Prediction) -> Table:
    """The whole answer."""
    table = Table(box=None, show_header=False)
    for key, value in _lines(found):
        table.add_row(key, Text(value, overflow="fold"))
    return table


def _lines(found: Prediction) -> Iterator[tuple[str, str]]:
    study, forecast = found.study, found.forecast
    yield "job", f"{study['name']}, {study['endpoint']}; it was not submitted"
    yield "rows", f"{study['rows']:,}; prefix groups: {study['prefix_groups']:,}"
    if num_errors := study["rows_that_cannot_run"]:
        failing = f"rows that cannot be rendered and will fail: {num_errors:,}"
        yield "errors", f"{failing}; first: {study['first_error']}"
    yield "tokens", _tokens(study)
    yield "hit rate", _hit_rates(study)
    yield "ETA", _eta(forecast.eta)
    if found.deadline_s is not None:
        yield "deadline", _deadline(forecast.eta, found.deadline_s)
    yield "cost", _cost(forecast.engine_time, found.price)
    yield "output", study["output_path"]


def _tokens(study: Mapping[str, Any]) -> str:
    mean, limit = study["output_tokens_a_row"], study["max_output_tokens_a_row"]
    bound = f"; at most {limit:,}" if limit is not None and limit > mean else ""
    return (
        f"{study['prompt_tokens']:,} in prompts, {study['output_tokens']:,} in answers "
        f"({mean:,.3g} a row, from {study['output_tokens_source']}{bound}); "
        f"{study['computed_tokens']:,} to compute"
    )


def _hit_rates(study: Mapping[str, Any]) -> str:
    best = f"{study['best_hit_rate']:.1%} at best"
    if study["kv_tokens"] is None:
        return f"{best}; the KV size is not known before an engine runs or was calibrated"
    kv = f"{study['kv_tokens']:,} KV tokens ({study['kv_tokens_source']})"
    if study["expected_hit_rate"] is None:
        return f"{best}; no row fits {kv}"
    expected = f"{study['expected_hit_rate']:.1%} expected with {kv}, {best}"
    if study["rows_larger_than_kv"]:
        expected += f"; {study['rows_larger_than_kv']:,} rows need more KV than there is"
    return expected


def _eta(eta: Eta) -> str:
    if eta.expected_s is None or eta.low_s is None or eta.high_s is None:
        return f"unknown: {eta.rests_on}"
    if math.isinf(eta.expected_s):
        return f"never: {eta.rests_on}"
    spread = f"{duration(eta.low_s)} to {duration(eta.high_s)}"
    if eta.source == "daemon":
        beside = f"in 9 of 10 cases {spread}, beside today's load"
    else:
        beside = f"{spread} by when in the trace it comes"
    return f"{duration(eta.expected_s)}; {beside}: {eta.rests_on}"


def _deadline(eta: Eta, deadline_s: float) -> str:
    length = duration(deadline_s)
    if eta.expected_s is None or eta.low_s is None or eta.high_s is None:
        return f"{length}: whether it is kept is unknown"
    if math.isinf(eta.expected_s):
        return f"{length}: missed"
    if eta.keeps(deadline_s):
        doubt = "" if eta.high_s <= deadline_s else ", but not if all goes slowly"
        return f"{length}: kept{doubt}"
    doubt = "" if eta.low_s > deadline_s else ", but kept if all goes well"
    return f"{length}: missed by {duration(eta.expected_s - deadline_s)}{doubt}"


def _cost(spent: EngineTime, price: Price) -> str:
    beside = "beside online calls no GPU-hour more"
    gpu_hours, cost = spent.gpu_hours(price), spent.cost(price)
    if spent.hours is None or gpu_hours is None:
        return f"{beside}; on engines of its own unknown: {spent.rests_on}"
    most = "at most " if spent.source == "daemon" else ""
    hours = f"{most}{_figure(gpu_hours)} GPU-hours"
    if price.gpus > 1:
        hours += f" ({_figure(spent.hours)} engine-hours of {price.gpus} GPUs)"
    money = "" if cost is None else f", which cost {_figure(cost)}"
    return f"{beside}; on engines of its own {hours}{money} ({spent.rests_on})"


def _figure(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.2g}"
