"""The `calibrate` command: measure an engine of the deployment and write its profile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from batchrun.calibration import (
    Measured,
    calibrate_engine,
    check_nothing_runs,
    choose_engine,
)
from batchrun.cli.console import LateProgress, print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.new_file import prepare_file
from batchrun.cli.options import ConfigOption, HomeOption, JsonOption, ModelOption
from batchrun.config import load_deployment, load_home
from batchrun.daemon.profiles import profile_path
from batchrun.errors import StateError
from batchrun.estimator import CalibrationProfile
from batchrun.files import write_atomically


def calibrate(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Profile to write. [default: a file in the home]"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Name of the engine. [default: the first]")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the steps of an engine, and write the profile that its scheduler starts from.

    Starts the engine and ends it again. Under three minutes beside the engine's start.
    """
    home = load_home(home_path)
    deployment = load_deployment(config, model=model)
    if DaemonClient(home).is_running():
        raise StateError(
            "a daemon runs, and its engines hold the machine; stop it with `batchrun down` first"
        )
    check_nothing_runs(deployment, home)
    index = choose_engine(deployment, engine)
    path = output or profile_path(deployment, deployment.engines[index], home)
    home.create()
    prepare_file(path)
    with LateProgress() as progress:
        measured = asyncio.run(calibrate_engine(deployment, home, index, progress))
    write_atomically(path, measured.profile.to_json().encode())
    if as_json:
        print_json(_document(measured, path))
        return
    for line in _lines(measured, path):
        say(line)


def _document(measured: Measured, path: Path) -> dict[str, object]:
    return {
        "path": str(path),
        "num_steps": measured.num_steps,
        "engine_start_s": measured.engine_start_s,
        "measuring_s": measured.measuring_s,
        "profile": json.loads(measured.profile.to_json()),
    }


def _lines(measured: Measured, path: Path) -> Iterator[str]:
    profile = measured.profile
    engine, best = profile.engine, profile.fitted[0]
    yield (
        f"engine     {engine.model}, vLLM {engine.vllm_version}, {engine.device}, {engine.dtype}, "
        f"{profile.kv_blocks:,} KV blocks of {engine.block_tokens} tokens"
    )
    yield (
        f"steps      {measured.num_steps:,} in {measured.measuring_s:.0f} s, after "
        f"{measured.engine_start_s:.0f} s of starting; {best.num_held_out:,} held out of the fits"
    )
    for fitted in profile.fitted:
        mark = ", chosen" if fitted is best else ", the paper's" if _is_papers(fitted.model) else ""
        yield (
            f"model      {fitted.model.name}: held-out error {fitted.held_out_mape:.1%} "
            f"(p95 {fitted.held_out_p95_ape:.0%}){mark}"
        )
    yield (
        f"identical  {profile.spread.mean_ape:.1%} mean spread of {profile.spread.num_steps:,} "
        f"steps in {profile.spread.num_groups:,} groups of equal load"
    )
    yield f"pivot      {profile.pivot_tokens:,} tokens a step reach 90 % of the best throughput"
    if profile.gap is not None:
        yield (
            f"gap        {1e3 * profile.gap.predict_s(1):.1f} ms between two steps of one request, "
            f"{1e3 * profile.gap.predict_s(64):.1f} ms of 64"
        )
    yield f"online     {_online(profile)}"
    yield f"profile    {path}"


def _is_papers(model: object) -> bool:
    return getattr(model, "name", None) == "echo"


def _online(profile: CalibrationProfile) -> str:
    shown = profile.online
    if shown is None:
        return "no figures: the model did not answer chat calls"
    return (
        f"TTFT p50 {shown.ttft_p50_s:.3f} s, p99 {shown.ttft_p99_s:.3f} s; TPOT p50 "
        f"{1e3 * shown.tpot_p50_s:.1f} ms, p99 {1e3 * shown.tpot_p99_s:.1f} ms "
        f"({shown.num_calls} calls alone, {shown.calls_per_s:.1f} a second)"
    )
