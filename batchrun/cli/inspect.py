"""The `inspect` command: what a job would do, before it does it.

Finds how much KV the deployment's engines have, as far as that is known without starting one, and
prints the figures in words, with small distributions and the order of a run.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchrun.cli.client import DaemonClient
from batchrun.cli.console import HomeOption, JsonOption, LateProgress, note, out, print_json
from batchrun.cli.deployment import read_deployment
from batchrun.cli.results import stored_job
from batchrun.config import Deployment, EngineConfig, load_home
from batchrun.daemon.plugin import existing_profile
from batchrun.errors import ConfigError, DaemonUnavailableError, InputError
from batchrun.estimator.profile import CalibrationProfile, profile_from_json
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.jobs.figures import PERCENTILES, Distribution, Inspected, Values
from batchrun.jobs.inputs.input_data import InputData, check_columns, check_ids, open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.pin import fetched_input
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import read_prompts
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import KvSize, estimate_outputs, study_job
from batchrun.jobs.submit import open_submitted
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord
from batchrun.types import ProgressSink

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's on GPUs; its CPU build and some attention kernels take larger blocks."""
BLOCK_SIZE_ARGUMENT = "--block-size"


def find_kv_size(flag_tokens: int | None, deployment: Deployment, home: Home) -> KvSize:
    """`--kv-tokens`, else what running engines say, else the calibration profile, else unknown.

    The size of a block likewise, where the engine's arguments do not say it.

    Raises ConfigError when a profile that batchrun.yaml names cannot be used.
    """
    profiles = [
        profile
        for engine in deployment.engines
        if (profile := _profile(deployment, engine, home)) is not None
    ]
    running = _running(home)
    block_tokens, block_source = _block_size(deployment, profiles, running)
    tokens, source = flag_tokens, "--kv-tokens"
    if tokens is None and running is not None:
        tokens, source = running["tokens"], "the running engine"
    if tokens is None and profiles:
        tokens = min(profile.kv_blocks * profile.engine.block_tokens for profile in profiles)
        source = "the calibration profile"
    return KvSize(tokens, source if tokens else "unknown", block_tokens, block_source)


def _block_size(
    deployment: Deployment, profiles: list[CalibrationProfile], running: dict[str, int] | None
) -> tuple[int, str]:
    arguments = deployment.engines[0].vllm_args
    for argument, following in zip(arguments, (*arguments, "")[1:], strict=True):
        name, _, value = argument.replace("_", "-").partition("=")
        given = value or following
        if name == BLOCK_SIZE_ARGUMENT and given.isdecimal() and int(given) > 0:
            return int(given), "vllm_args in batchrun.yaml"
    if running is not None:
        return running["block_tokens"], "the running engine"
    if profiles:
        return profiles[0].engine.block_tokens, "the calibration profile"
    return DEFAULT_BLOCK_TOKENS, "vLLM's default"


def _running(home: Home) -> dict[str, int] | None:
    """What the engine with the smallest KV tells of it, or None."""
    try:
        engines = DaemonClient(home).get("/status")["engines"]
    except DaemonUnavailableError:
        return None
    told = [engine["kv"] for engine in engines if engine["kv"] and engine["kv"]["tokens"]]
    return min(told, key=lambda kv: int(kv["tokens"]), default=None)


def _profile(deployment: Deployment, engine: EngineConfig, home: Home) -> CalibrationProfile | None:
    path = existing_profile(deployment, engine, home)
    if path is None:
        return None
    try:
        return profile_from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


BLOCKS = " ▁▂▃▄▅▆▇█"
NUM_BINS = 24
SHOWN_STRETCHES = 5
LOG_RATIO = 20.0
"""From where on the largest value over the median makes the axis a logarithm."""


def rendered(figures: Mapping[str, Any], shown: Mapping[str, Distribution]) -> RenderableType:
    """The whole answer."""
    table = Table(box=None, show_header=False)
    for key, value in _lines(figures):
        table.add_row(key, Text(value, overflow="fold"))
    parts: list[RenderableType] = [table]
    if shown:
        parts += [Text(), _distributions(shown)]
    if figures["order"]:
        parts += [Text(), _order(figures["order"])]
    return Group(*parts)


def histogram(values: Values) -> tuple[str, bool]:
    """(bars from the smallest to the largest value, whether their bins are logarithmic)."""
    scaled, is_log = values.astype(np.float64), is_spread(values)
    if is_log:
        scaled = np.log(scaled)
    counts, _ = np.histogram(scaled, bins=NUM_BINS)
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[height] for height in heights), is_log


def is_spread(values: Values) -> bool:
    """Whether a few values are so much larger than most that an axis should be logarithmic."""
    return bool(values.min() > 0 and values.max() > LOG_RATIO * np.median(values))


def in_words(value: float, *, is_share: bool = False) -> str:
    """A figure as it is printed: shares in per cent, large ones without a fraction."""
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "job", f"{figures['name']}, {figures['endpoint']}"
    yield "rows", f"{figures['rows']:,}"
    if num_errors := figures["rows_with_template_errors"]:
        failing = f"rows that cannot be rendered and will fail: {num_errors:,}"
        yield "errors", f"{failing}; first: {figures['first_error']}"
    yield "prompt", f"{_pair(figures, 'prompt_tokens')} tokens a row, {_total(figures)}"
    shared = _pair(figures, "shared_share", is_share=True)
    of_tokens = f"{figures['shared_share_of_tokens']:.1%} of all tokens"
    groups = f"groups of rows: {figures['prefix_groups']:,}"
    yield "shared", f"{shared} of a prompt is a prefix of an earlier row; {of_tokens}; {groups}"
    key = _pair(figures, "key_portion_share", is_share=True)
    rows_per_key = _pair(figures, "rows_per_key_portion")
    yield (
        "key portion",
        (f"{key} of a prompt; {figures['key_portions']:,} of them, with {rows_per_key} rows"),
    )
    yield "answers", _answers(figures)
    yield "hit rate", _hit_rates(figures)
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
        return "of unknown length: the job sets no max_tokens"
    ratio = figures["prompt_to_output_ratio_mean"]
    times = "" if ratio is None else f"; prompts are {in_words(ratio)} times as long"
    source = figures["output_tokens_source"]
    return f"{_pair(figures, 'output_tokens')} tokens (from {source}{bound}){times}"


def _hit_rates(figures: Mapping[str, Any]) -> str:
    best = f"at best {figures['best_hit_rate']:.1%} (blocks of {figures['block_tokens']} tokens)"
    kv_tokens = figures["kv_tokens"]
    if kv_tokens is None:
        return f"{best}; the KV size is unknown, --kv-tokens N gives it"
    kv = f"{kv_tokens:,} KV tokens ({figures['kv_tokens_source']})"
    if figures["expected_hit_rate"] is None:
        return f"{best}; no row fits {kv}"
    expected = (
        f"{best}; {figures['expected_hit_rate']:.1%} expected with {kv}, "
        f"{figures['expected_hit_rate_as_written']:.1%} in the input's order"
    )
    if figures["rows_larger_than_kv"]:
        expected += f"; {figures['rows_larger_than_kv']:,} rows need more KV than there is"
    return expected


def _distributions(shown: Mapping[str, Distribution]) -> Table:
    table = Table("distribution", "least", "", "most", "median", box=None)
    for each in shown.values():
        bars, is_log = histogram(each.values)
        least, median, most = (
            in_words(value, is_share=each.is_share)
            for value in (each.values.min(), float(np.median(each.values)), each.values.max())
        )
        table.add_row(f"{each.title}{' (log)' if is_log else ''}", least, bars, most, median)
    return table


def _order(stretches: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("runs", "rows", "tokens", "shared", "begins", box=None)
    for place, stretch in enumerate(stretches[:SHOWN_STRETCHES], start=1):
        begins = stretch["begins"] if stretch["is_shared"] else f"each its own: {stretch['begins']}"
        table.add_row(
            str(place),
            f"{stretch['num_rows']:,}",
            f"{stretch['prompt_tokens']:,.0f}",
            f"{stretch['shared_tokens']:,.0f}",
            Text(begins),
        )
    return table


def _pair(figures: Mapping[str, Any], name: str, *, is_share: bool = False) -> str:
    """Mean and deviation."""
    mean, std = (figures[f"{name}_{part}"] for part in ("mean", "std"))
    text = in_words(mean, is_share=is_share)
    return text if std is None else f"{text} ± {in_words(std, is_share=is_share)}"


def write_page(path: Path, figures: Mapping[str, Any], shown: Mapping[str, Distribution]) -> None:
    """Draw the distributions as curves in one HTML file with nothing outside it.

    Raises InputError when the file cannot be written, or there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("--html needs matplotlib: pip install matplotlib") from error
    drawn = Figure(figsize=(12, 7), layout="constrained")
    panels = drawn.subplots(2, 3, sharey=True, squeeze=False).flat
    for axes, each in zip_longest(panels, shown.values()):
        if each is None:
            axes.remove()
            continue
        axes.plot(each.percentiles, np.array(PERCENTILES) / 100, color="#2e7d4f")
        axes.set(
            title=each.title, xscale="log" if is_spread(each.values) else "linear", ylim=(0, 1)
        )
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%} of rows")
    svg = io.StringIO()
    drawn.savefig(svg, format="svg")
    title = escape(f"Prompts of {figures['name']}: {figures['rows']:,} rows")
    drawing = svg.getvalue()[svg.getvalue().index("<svg") :]
    page = f"<!doctype html>\n<meta charset=utf-8><title>{title}</title><h1>{title}</h1>\n{drawing}"
    try:
        write_atomically(path, page.encode())
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written: {error.strerror}") from error


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
    deployment = read_deployment(None)
    kv = find_kv_size(kv_tokens, deployment, home)
    prompts = read_prompts(deployment.model_folder(home), now=datetime.now().astimezone())
    job = study_job(spec, data, template, prompts, progress)
    outputs = estimate_outputs(spec, data, stored, job.counted.bytes_per_token)
    return Inspected(spec, job, outputs, kv)
