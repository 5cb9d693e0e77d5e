"""`submit --dry-run`: a submission's checks and what would come of it; nothing is left behind."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from batchrun.cli.console import ProgressBar, named_lines, vllm_needed
from batchrun.cli.inspect import answering, earlier_jobs, error_lines, find_kv_size, hit_rates
from batchrun.config import Deployment
from batchrun.control.client import DaemonClient
from batchrun.control.fitting import find_fleet, four_bytes_each, unfit
from batchrun.control.starting import LOOK_WAIT_S, read_deployment
from batchrun.daemon.plugin import existing_profile
from batchrun.daemon.supervisor import engine_python
from batchrun.errors import DaemonUnavailableError, EngineError, InputError, NotLeadingError
from batchrun.files import is_url
from batchrun.home import Home
from batchrun.jobs.expected_answers import OutputEstimate, Stored, estimate_outputs, num_choices
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import JobStudy, KvSize, study_job
from batchrun.jobs.submit import checked_job
from batchrun.quantities import count, duration, in_words
from batchrun.simulator.planner.job_forecast import (
    HOUR_S,
    EngineTime,
    Eta,
    Forecast,
    Prediction,
    Price,
    computed_tokens,
    study_figures,
)
from batchrun.types import DEFAULT_MODEL, ProgressSink

if TYPE_CHECKING:
    from batchrun.simulator.planner.colocation import SimulatedFleet


NO_DAEMON = (
    "no daemon runs; one that has run offline work knows the pace, and --trace TRACE simulates it "
    "beside recorded calls"
)
NO_PACE = (
    "the daemon has seen no offline work of this model yet; once rows have run it knows the pace, "
    "and --trace TRACE simulates it beside recorded calls"
)
NO_COST = "--profile PROFILE simulates it on an engine of its own"


def measured(home: Home, computed_tokens: int, spec: JobSpec) -> Forecast:
    """What the daemon predicts for so much work, by the pace that it has measured; unknown where
    no daemon runs, or has run nothing yet."""
    model = {} if spec.model == DEFAULT_MODEL else {"model": spec.model}
    work = {"computed_tokens": computed_tokens, "weight": spec.weight, **model}
    daemon = DaemonClient(home, timeout_s=LOOK_WAIT_S)
    try:
        answer = daemon.post("/foretell", work)
        is_offline_on = daemon.get("/status")["offline"]
    except (DaemonUnavailableError, NotLeadingError):
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


UNKNOWN = Forecast.unknown("", "")
NOTHING_TO_RUN = Forecast.unknown("no row can run", "no row can run")


def predict(
    file: Path, home: Home, trace: Path | None, profile: str | None, price: str | None
) -> Prediction:
    """What would become of a job file. Makes no file, folder or store.

    `trace`, `profile` and `price` are what the user assumes of the load and the engines. Raises
    what `submit` raises for the same file; InputError, ConfigError and EngineError where what is
    assumed cannot be used.
    """
    with ProgressBar() as progress:
        spec = load_job_file(file, cwd=Path.cwd())
        home.check()
        deployment = read_deployment(None)
        simulation: SimulatedFleet | None = None
        if trace is not None or profile is not None:
            simulation = _simulation(trace, profile, deployment, home, spec.model)
        cost = _price(price, simulation)
        if simulation is None or profile is None:
            kv = find_kv_size(None, deployment.serving(spec.model), home)
        else:
            kv = simulation.kv
        # A store that nobody has open would be left with the files of a reader.
        with earlier_jobs(home) if DaemonClient(home).is_running() else nullcontext() as stored:
            job, outputs, figures = _studied(spec, kv, (deployment, home), stored, progress)
        if not figures["computed_tokens"]:
            return Prediction(figures, spec.deadline_s, NOTHING_TO_RUN, cost)
        tokens = figures["computed_tokens"]
        # A trace stands in for what a daemon has measured.
        forecast = UNKNOWN if trace is not None else measured(home, tokens, spec)
        if simulation is None and forecast.eta.source is None:
            simulation = _own_simulation(deployment, home, spec.model)
        if simulation is not None:
            rows = simulation.job(spec, job.plan, outputs)
            if not rows.num_rows:
                none = f"no row can run on {simulation.kind.name}"
                return Prediction(figures, spec.deadline_s, Forecast.unknown(none, none), cost)
            runs = np.isin(job.tree.rows, rows.order.rows)
            tokens = _computed(job, outputs, figures, runs)
            forecast = simulation.forecast(rows, tokens, forecast.eta, progress)
    if spec.start == "cheap" and forecast.eta.source is not None:
        rests_on = f"{forecast.eta.rests_on}; counted from a start that may wait for cheap hours"
        forecast = replace(forecast, eta=replace(forecast.eta, rests_on=rests_on))
    return Prediction(figures, spec.deadline_s, forecast, cost)


def _studied(
    spec: JobSpec,
    kv: KvSize,
    served: tuple[Deployment, Home],
    stored: Stored | None,
    progress: ProgressSink,
) -> tuple[JobStudy, OutputEstimate, dict[str, Any]]:
    """The study, and the figures that are printed. Checks all that a submission checks."""
    fleet = find_fleet(spec, served[1])
    with checked_job(spec, scratch=Path(tempfile.gettempdir()), progress=progress) as given:
        data, template = given
        deployment, home = served
        folder, now = deployment.model_folder(home, spec.model), datetime.now().astimezone()
        python = engine_python(deployment.engines[0], home)
        with read_prompts(folder, now=now, python=python) as prompts:
            job = study_job(spec, data, template, prompts, progress)
            ratio, model = job.counted.bytes_per_token, answering(spec, home)
            outputs = estimate_outputs(spec, data, ratio, stored, model, guesses=True)
            inspected = job.figures(outputs, kv)
            warnings = (
                []
                if fleet is None
                else list(unfit(spec, fleet, given, prompts.count or four_bytes_each))
            )
    answers = outputs.filled[job.tree.rows]
    figures = study_figures(inspected, inspected["prompt_tokens_total"], float(answers.sum()))
    fits = job.study.prompts + answers / num_choices(spec.request) <= kv.most_tokens
    figures["computed_tokens"] = _computed(job, outputs, figures, fits)
    return job, outputs, figures | {"warning": "; ".join(warnings) or None}


def _computed(
    job: JobStudy, outputs: OutputEstimate, figures: Mapping[str, Any], runs: NDArray[np.bool_]
) -> int:
    """Tokens that the rows at these places of the tree have to compute."""
    answers = outputs.filled[job.tree.rows[runs]]
    return computed_tokens(figures, float(job.study.prompts[runs].sum()), float(answers.sum()))


def _simulation(
    trace: Path | None, profile: str | None, deployment: Deployment, home: Home, model: str
) -> SimulatedFleet:
    with vllm_needed("submit --dry-run with --trace or --profile", home):
        from batchrun.simulator.planner.colocation import simulation_of
    found = simulation_of(trace, profile, deployment, home, model)
    if found is None:
        engine = deployment.serving(model).engines[0]
        raise InputError(
            f"--trace: engine {engine.name} has no profile yet; run `batchrun calibrate`, or name "
            "one with --profile"
        )
    return found


def _own_simulation(deployment: Deployment, home: Home, model: str) -> SimulatedFleet | None:
    """Of the profile of the model's first engine, where there is one and vLLM is here."""
    if existing_profile(deployment, deployment.serving(model).engines[0], home) is not None:
        with suppress(EngineError):
            return _simulation(None, None, deployment, home, model)
    return None


def _price(price: str | None, simulation: SimulatedFleet | None) -> Price:
    given = Price() if simulation is None else simulation.price
    if price is None:
        return given
    if given.per_gpu_hour is not None:
        raise InputError(f"--price {price}: --profile has a price already")
    return Price.parse(price)


def rendered(found: Prediction) -> Table:
    """The whole answer."""
    return named_lines(_lines(found))


def _lines(found: Prediction) -> Iterator[tuple[str, str]]:
    study, forecast = found.study, found.forecast
    yield "job", f"{study['name']}, {study['endpoint']}; it was not submitted"
    yield "rows", f"{study['rows']:,}; prefix groups: {study['prefix_groups']:,}"
    yield from error_lines(study["rows_that_cannot_run"], study["first_error"])
    if study.get("warning"):
        yield "warning", study["warning"]
    yield "tokens", _tokens(study)
    unknown = "the KV size is not known before an engine runs or was calibrated"
    yield "hit rate", hit_rates(study, unknown)
    yield "ETA", _eta(forecast.eta)
    if found.deadline_s is not None:
        yield "deadline", _deadline(forecast.eta, found.deadline_s)
    yield "cost", _cost(forecast.engine_time, found.price)
    yield "output", _place(study["output_path"])


def _place(path: str) -> str:
    is_there = not is_url(path) and Path(path).exists()
    return f"{path}; it is there already and would be replaced" if is_there else path


def _tokens(study: Mapping[str, Any]) -> str:
    mean, limit = study["output_tokens_a_row"], study["max_output_tokens_a_row"]
    bound = f"; at most {limit:,}" if limit is not None and limit > mean else ""
    return (
        f"{study['prompt_tokens']:,} in prompts, {study['output_tokens']:,} in answers "
        f"({in_words(mean)} a row, from {study['output_tokens_source']}{bound}); "
        f"{study['computed_tokens']:,} to compute"
    )


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
