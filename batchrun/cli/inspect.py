"""The `inspect` command: what a job would do, before it does it.

Finds how much KV the deployment's engines have, as far as that is known without starting one, and
prints the figures in words, with small distributions and the order of a run.
"""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import RenderableType

from batchrun.cli.console import (
    HomeOption,
    JsonOption,
    ProgressBar,
    answer,
    columns,
    named_lines,
    note,
)
from batchrun.config import Deployment
from batchrun.control.client import DaemonClient
from batchrun.control.starting import read_deployment
from batchrun.control.submitting import default_model, stored_job
from batchrun.daemon.plugin import existing_profile, read_profile
from batchrun.daemon.supervisor import engine_python
from batchrun.engine_config import EngineConfig
from batchrun.errors import DaemonUnavailableError, InputError, StoreError
from batchrun.estimator.profile import CalibrationProfile
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.jobs.expected_answers import DefaultModel, Stored, estimate_outputs
from batchrun.jobs.inputs.input_data import InputData, check_columns, check_ids, open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.pin import fetched_input
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import PERCENTILES, Distribution, KvSize, Values, study_job
from batchrun.jobs.submit import open_submitted
from batchrun.quantities import in_words
from batchrun.store.database import Store, open_to_read
from batchrun.types import DEFAULT_MODEL, ProgressSink

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's on GPUs; its CPU build and some attention kernels take larger blocks."""
BLOCK_SIZE = re.compile(r"--block[-_]size[ =]0*([1-9]\d*)(?!\S)")


def find_kv_size(flag_tokens: int | None, deployment: Deployment, home: Home) -> KvSize:
    """`--kv-tokens`, else what running engines say, else the calibration profile, else unknown.

    The size of a block likewise, where the engine's arguments do not say it.

    Raises ConfigError when a profile that batchrun.yaml names cannot be used.
    """
    profiles = [_profile(deployment, engine, home) for engine in deployment.engines]
    running = _running(deployment, home)
    block = _block_size(deployment, [*filter(None, profiles)], running)
    sources: dict[str, list[int | None]] = {
        "--kv-tokens": [flag_tokens],
        "the running engine": [kv.get("tokens") for kv in running],
        "the calibration profile": [
            None if each is None else each.kv_blocks * each.engine.block_tokens for each in profiles
        ],
    }
    for source, told in sources.items():
        if known := [tokens for tokens in told if tokens]:
            most = max(known) if len(known) == len(told) else math.inf
            return KvSize(min(known), source, *block, most)
    return KvSize(None, "unknown", *block)


def _block_size(
    deployment: Deployment, profiles: list[CalibrationProfile], running: list[dict[str, int]]
) -> tuple[int, str]:
    if given := BLOCK_SIZE.search(" ".join(deployment.engines[0].vllm_args)):
        return int(given[1]), "vllm_args in batchrun.yaml"
    if running and running[0].get("tokens"):
        return running[0]["block_tokens"], "the running engine"
    if profiles:
        return profiles[0].engine.block_tokens, "the calibration profile"
    return DEFAULT_BLOCK_TOKENS, "vLLM's default"


def _running(deployment: Deployment, home: Home) -> list[dict[str, int]]:
    """What each of these engines that runs says of its KV, the smallest first; of all engines
    where there is no batchrun.yaml."""
    try:
        engines = DaemonClient(home).get("/status")["engines"]
    except DaemonUnavailableError:
        return []
    names = {name for engine in deployment.engines for name in engine.replica_names}
    told = [each["kv"] or {} for each in engines if not deployment.file or each["name"] in names]
    return sorted(told, key=lambda kv: kv.get("tokens") or math.inf)


def _profile(deployment: Deployment, engine: EngineConfig, home: Home) -> CalibrationProfile | None:
    path = existing_profile(deployment, engine, home)
    return None if path is None else read_profile(path)


BLOCKS = " ▁▂▃▄▅▆▇█"
NUM_BINS = 24
SHOWN_STRETCHES = 5
LOG_RATIO = 20.0
"""From where on the largest value over the median makes the axis a logarithm."""


def _shown(
    figures: Mapping[str, Any], distributions: Mapping[str, Distribution]
) -> Iterator[RenderableType]:
    yield named_lines(_lines(figures))
    if distributions:
        yield ""
        headings = "distribution", "least", "", "most", "median"
        yield columns(*headings, rows=map(_distribution, distributions.values()))
    if figures["order"]:
        yield ""
        stretches = enumerate(figures["order"][:SHOWN_STRETCHES], start=1)
        yield columns("runs", "rows", "tokens", "shared", "begins", rows=map(_stretch, stretches))


def _distribution(each: Distribution) -> Iterator[str]:
    bars, is_log = histogram(each.values)
    least, median, most = np.percentile(each.values, (0, 50, 100))
    yield f"{each.title}{' (log)' if is_log else ''}"
    yield in_words(least, is_share=each.is_share)
    yield bars
    yield in_words(most, is_share=each.is_share)
    yield in_words(median, is_share=each.is_share)


def _stretch(numbered: tuple[int, Mapping[str, Any]]) -> Iterator[str]:
    place, stretch = numbered
    yield str(place)
    yield f"{stretch['num_rows']:,}"
    yield f"{stretch['prompt_tokens']:,.0f}"
    yield f"{stretch['shared_tokens']:,.0f}"
    yield stretch["begins"] if stretch["is_shared"] else f"each its own: {stretch['begins']}"


def histogram(values: Values) -> tuple[str, bool]:
    """(bars from the smallest to the largest value, whether their bins are logarithmic)."""
    is_log = is_spread(values)
    counts, _ = np.histogram(np.log(values) if is_log else values, bins=NUM_BINS)
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[height] for height in heights), is_log


def is_spread(values: Values) -> bool:
    """Whether a few values are so much larger than most that an axis should be logarithmic."""
    return bool(values.min() > 0 and values.max() > LOG_RATIO * np.median(values))


def _lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "job", f"{figures['name']}, {figures['endpoint']}"
    yield "rows", f"{figures['rows']:,}"
    yield from error_lines(figures["rows_with_template_errors"], figures["first_error"])
    yield "prompt", f"{_pair(figures, 'prompt_tokens')} tokens a row, {_total(figures)}"
    shared = _pair(figures, "shared_share", is_share=True)
    of_tokens = f"{figures['shared_share_of_tokens']:.1%} of all tokens"
    groups = f"groups of rows: {figures['prefix_groups']:,}"
    yield "shared", f"{shared} of a prompt is a prefix of an earlier row; {of_tokens}; {groups}"
    key = _pair(figures, "key_portion_share", is_share=True)
    rows_per_key = _pair(figures, "rows_per_key_portion")
    portions = f"{figures['key_portions']:,} of them, with {rows_per_key} rows"
    yield "key portion", f"{key} of a prompt; {portions}"
    yield "answers", _answers(figures)
    unknown = "the KV size is unknown, --kv-tokens N gives it"
    yield "hit rate", hit_rates(figures, unknown)
    computed = f"computes about {figures['prompt_tokens_computed']:,.0f} prompt tokens"
    yield "a run", f"{computed}, writes {figures['output_path']}"


def _total(figures: Mapping[str, Any]) -> str:
    how = "no tokenizer here, so estimated"
    if figures["rows_tokenised"]:
        how = f"{figures['rows_tokenised']:,} rows tokenised"
    total, ratio = figures["prompt_tokens_total"], figures["bytes_per_token"]
    return f"{total:,.0f} in all ({how} at {ratio:.2f} bytes a token)"


def _answers(figures: Mapping[str, Any]) -> str:
    limit = figures["max_output_tokens"]
    bound = "" if limit is None else f", at most {limit:,}"
    if figures["output_tokens_mean"] is None:
        return "of unknown length: the job sets no limit"
    ratio = figures["prompt_to_output_ratio_mean"]
    times = "" if ratio is None else f"; prompts are {in_words(ratio)} times as long"
    source = figures["output_tokens_source"]
    return f"{_pair(figures, 'output_tokens')} tokens (from {source}{bound}){times}"


def error_lines(num_errors: int, first_error: str | None) -> Iterator[tuple[str, str]]:
    """A line where rows cannot run."""
    if num_errors:
        failing = f"rows that cannot be rendered and will fail: {num_errors:,}"
        yield "errors", f"{failing}; first: {first_error}"


def hit_rates(figures: Mapping[str, Any], unknown: str) -> str:
    """The best and the expected hit rate; `unknown` is said where the KV size is unknown."""
    best = f"at best {figures['best_hit_rate']:.1%}"
    if "block_tokens" in figures:
        best += f" (blocks of {figures['block_tokens']} tokens)"
    if figures["kv_tokens"] is None:
        return f"{best}; {unknown}"
    kv = f"{figures['kv_tokens']:,} KV tokens ({figures['kv_tokens_source']})"
    if figures["expected_hit_rate"] is None:
        return f"{best}; no row fits {kv}"
    expected = f"{best}; {figures['expected_hit_rate']:.1%} expected with {kv}"
    if "expected_hit_rate_as_written" in figures:
        expected += f", {figures['expected_hit_rate_as_written']:.1%} in the input's order"
    if figures["rows_larger_than_kv"]:
        expected += f"; {figures['rows_larger_than_kv']:,} rows need more KV than there is"
    return expected


def _pair(figures: Mapping[str, Any], name: str, *, is_share: bool = False) -> str:
    """Mean and deviation."""
    mean, std = (figures[f"{name}_{part}"] for part in ("mean", "std"))
    text = in_words(mean, is_share=is_share)
    return text if std is None else f"{text} ± {in_words(std, is_share=is_share)}"


PAGE_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em;max-width:80em}"
    "th{text-align:left;padding-right:2em;vertical-align:top;white-space:nowrap}"
    "svg{max-width:100%;height:auto}"
)


def write_page(path: Path, figures: Mapping[str, Any], shown: Mapping[str, Distribution]) -> None:
    """Write the figures and draw the distributions as curves, in one HTML file with nothing
    outside it.

    Raises InputError when the file cannot be written, or there is no matplotlib.
    """
    title = escape(f"Prompts of {figures['name']}: {figures['rows']:,} rows")
    lines = "\n".join(
        f"<tr><th scope=row>{escape(name)}<td>{escape(said)}" for name, said in _lines(figures)
    )
    page = (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{PAGE_STYLE}</style>\n<h1>{title}</h1>\n<table>\n{lines}\n</table>\n"
        f"<h2>How rows are spread</h2>\n{_drawing(shown)}"
    )
    try:
        write_atomically(path, page.encode())
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written: {error.strerror}") from error


def _drawing(shown: Mapping[str, Distribution]) -> str:
    """An SVG element. Raises InputError where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
    except ModuleNotFoundError as error:
        raise InputError("--html needs matplotlib: pip install matplotlib") from error
    drawn = Figure(figsize=(12, 7), layout="constrained")
    panels = iter(drawn.subplots(2, 3, sharey=True, squeeze=False).flat)
    for each, axes in zip(shown.values(), panels, strict=False):
        is_log = is_spread(each.values)
        axes.plot(each.percentiles, np.array(PERCENTILES) / 100, color="#2e7d4f")
        axes.set(title=each.title, xscale="log" if is_log else "linear", ylim=(0, 1))
        axes.grid(alpha=0.3)
        round_ticks = LogLocator(numticks=6) if is_log else MaxNLocator(5, steps=[1, 2, 5, 10])
        axes.xaxis.set_major_locator(round_ticks)
        axes.xaxis.set_major_formatter(partial(_tick, is_share=each.is_share))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%} of rows")
    for axes in panels:
        axes.remove()
    svg = io.StringIO()
    drawn.savefig(svg, format="svg")
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def _tick(value: float, _: int | None, *, is_share: bool) -> str:
    return f"{value:.0%}" if is_share else in_words(value)


JOB_FILE_SUFFIXES = (".yaml", ".yml")


def inspect(
    target: Annotated[str, typer.Argument(help="Job file (YAML) or job id.")],
    *,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of KV that an engine has, for the hit rate.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also draw the distributions, as one HTML file.")
    ] = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Study a job's prompts: lengths, shared prefixes, hit rates, and the order of a run."""
    if html is not None and html.is_dir():
        raise InputError(f"--html {html}: is a folder; name a file")
    if html is not None and not html.absolute().parent.is_dir():
        raise InputError(f"--html {html}: there is no folder {html.parent}")
    with ProgressBar() as progress, _opened(target, home, progress) as (spec, data, stored):
        template = RequestTemplate(spec, data.columns, model=spec.model)
        check_columns(spec, data)
        check_ids(data, progress=progress)
        deployment = read_deployment(None)
        kv = find_kv_size(kv_tokens, deployment.serving(spec.model), home)
        folder, now = deployment.model_folder(home, spec.model), datetime.now().astimezone()
        python = engine_python(deployment.engines[0], home)
        with read_prompts(folder, now=now, python=python) as prompts:
            job = study_job(spec, data, template, prompts, progress)
            ratio, model = job.counted.bytes_per_token, answering(spec, home)
            outputs = estimate_outputs(spec, data, ratio, stored, model)
            figures = job.figures(outputs, kv)
    distributions = job.distributions(outputs)
    if html is not None:
        write_page(html, figures, distributions)
        note(f"distributions drawn in {html}")
    answer(figures, *_shown(figures, distributions), as_json=as_json)


def answering(spec: JobSpec, home: Home) -> DefaultModel:
    """What answers a job that names no model, where that is known at once; sure where a daemon
    runs: `up` can take another than batchrun.yaml has."""
    name = default_model(home, wait_s=0.0) if spec.model == DEFAULT_MODEL else None
    return DefaultModel(name, is_sure=name is not None and DaemonClient(home).is_running())


@contextmanager
def earlier_jobs(home: Home) -> Iterator[Stored | None]:
    """The store, to see how long the answers of earlier jobs were; None where it cannot be read."""
    store: Store | None = None
    with suppress(StoreError):
        store = open_to_read(home.store_location) if home.has_store else None
    try:
        yield None if store is None else (store, None)
    finally:
        if store is not None:
            store.close()


@contextmanager
def _opened(
    target: str, home: Home, progress: ProgressSink
) -> Iterator[tuple[JobSpec, InputData, Stored | None]]:
    """A job file's input as it is, or a submitted job's as it was, with what is stored of it."""
    if target.endswith(JOB_FILE_SUFFIXES):
        spec = load_job_file(Path(target), cwd=Path.cwd())
        folder = Path(tempfile.gettempdir())
        fetched = fetched_input(spec.input, folder, progress)
        with fetched as (given, _), open_input(given) as data, earlier_jobs(home) as stored:
            yield spec, data, stored
        return
    with stored_job(target, home) as (store, record):
        spec = JobSpec.model_validate_json(record.spec)
        with open_submitted(record, spec, links=home.inputs) as data:
            yield spec, data, (store, record)
