"""The `engine`, `models`, `calibrate` and `doctor` commands."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JsonOption,
    ModelOption,
    ProgressBar,
    answer,
    command_group,
    note,
    out,
    prepare_file,
)
from batchrun.cli.operate.agent import environment, serve
from batchrun.cli.operate.explain import explain
from batchrun.cli.status import SHOWN_STALL_S, describe_parts, describe_past, describe_progress
from batchrun.config import TINY_MODELS, Deployment
from batchrun.control.client import DIRECT, DaemonClient
from batchrun.control.starting import LOOK_WAIT_S, read_deployment
from batchrun.daemon.plugin import profile_path
from batchrun.daemon.supervisor import check_gateway_port, default_port, engine_python
from batchrun.engine.client import normalise_url
from batchrun.engine.command import check_model, check_port_free, find_vllm, has_gpu, install_engine
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.engine.tiny_vision_model import build_tiny_vision_model
from batchrun.engine_config import EngineConfig
from batchrun.errors import (
    BatchrunError,
    DaemonUnavailableError,
    EngineError,
    InputError,
    StateError,
    known_name,
)
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.scheduling.policies import POLICIES, QUEUES
from batchrun.simulator.calibrate import (
    Measured,
    calibrate_engine,
    check_nothing_runs,
    choose_engine,
)
from batchrun.types import ProgressSink

LOOK_S = 0.5
engine_app = command_group("One engine with its agent, vLLM's environment, and how engines run.")
engine_app.command()(serve)
engine_app.command()(environment)
engine_app.command()(explain)
models_app = command_group("Models for trying things out.")


@engine_app.command()
def install(
    *,
    cpu: Annotated[bool, typer.Option("--cpu", help="vLLM built for CPU.")] = False,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Install vLLM into an environment of its own: the GPU build, or the locked CPU one."""
    home.create()
    with ProgressBar() as progress:
        told = a_line_a_stage(progress)
        python = install_engine(home.engine_environment, cpu=cpu, progress=told)
    answer({"python": str(python)}, f"engine installed: {python}", as_json=as_json)


def a_line_a_stage(progress: ProgressSink) -> ProgressSink:
    """Says each stage once, in a line that stays, and shows how far it is."""
    said: set[str] = set()

    def tell(stage: str, done: int, total: int) -> None:
        kind = stage.split()[0]
        if kind not in said:
            said.add(kind)
            note(f"fetching {total or 'the'} packages" if kind == "fetching" else stage)
        progress(stage, done, total)

    return tell


def _one_of(known: Collection[str]) -> Callable[[str | None], str | None]:
    """Checks a name that was given."""

    def check(name: str | None) -> str | None:
        try:
            return name and known_name(name, known)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return check


@engine_app.command(name="set")
def set_engines(
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar=f"<{'|'.join(POLICIES)}>",
            callback=_one_of(POLICIES),
            help="Scheduling policy, from the next step on.",
        ),
    ] = None,
    online_queue: Annotated[
        str | None,
        typer.Option(
            metavar=f"<{'|'.join(QUEUES)}>",
            callback=_one_of(QUEUES),
            help="Order of waiting calls, from the next step on.",
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a step; less than vLLM was started with.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="First go back to what the engines were started with.")
    ] = False,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Change how running engines schedule, until the daemon ends."""
    given = {"policy": policy, "token_budget": budget, "online_queue": online_queue}
    change = {key: value for key, value in given.items() if reset or value is not None}
    if not change:
        raise InputError("nothing to change: give --policy, --budget, --online-queue or --reset")
    done = DaemonClient(home).post("/engines", change)
    shown = [
        f"engine {name}: does not listen now; it will get the change when it does"
        if now is None
        else f"engine {name}: policy {now['policy']}, order {now['online_queue']}, "
        f"{now['token_budget']:,} tokens a step"
        for name, now in done["engines"].items()
    ]
    answer(done, *shown, as_json=as_json)


@engine_app.command()
def restart(
    *,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One engine at a time; calls and rows go on.")
    ] = False,
    drain_s: Annotated[
        float,
        typer.Option("--drain-s", min=0, help="How long calls may go on in an engine before that."),
    ] = 300.0,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Restart the engines with what batchrun.yaml says now; stop at one that does not come back.

    Goes on in the daemon when this command is interrupted.
    """
    if not rolling:
        raise InputError("give --rolling; all at once: `batchrun down`, then `batchrun up`")
    client = DaemonClient(home)
    client.post("/restart", {"drain_s": drain_s})
    num_said, told = 0, client.get("/restart")
    while True:
        for line in [] if as_json else told["told"][num_said:]:
            out.print(line)
        num_said = len(told["told"])
        if told["is_over"]:
            break
        time.sleep(LOOK_S)
        told = client.get("/restart")
    if told["failure"] is not None:
        raise EngineError(told["failure"])
    if as_json:
        answer(told, as_json=True)


@engine_app.command()
def scale(
    fleet: Annotated[str, typer.Argument(help="The name of an engine with `ray`.")],
    replicas: Annotated[int, typer.Argument(help="How many there shall be.")],
    *,
    drain_s: Annotated[
        float, typer.Option("--drain-s", min=0, help="How long calls may go on in those too many.")
    ] = 300.0,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Have more or fewer replicas of a fleet, within its bounds; rows go back, calls end first."""
    wanted = {"fleet": fleet, "replicas": replicas, "drain_s": drain_s}
    done = DaemonClient(home).post("/fleets", wanted)
    answer(done, f"fleet {fleet}: {replicas} replicas from now on", as_json=as_json)


@models_app.command()
def tiny(
    path: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    vision: Annotated[bool, typer.Option("--vision", help="One that takes images too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a small model with random weights, the same bytes every time."""
    build = build_tiny_vision_model if vision else build_tiny_model
    build(path)
    kind = "Idefics3" if vision else "Llama"
    shown = f"{path}: a random {kind} of 4 layers; its answers are noise"
    answer({"path": str(path)}, shown, as_json=as_json)


def calibrate(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Profile to write. [default: a file in the home]"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Name of the engine. [default: the first]")
    ] = None,
    model: ModelOption = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Measure the steps of an engine, and write the profile that its scheduler starts from.

    Starts the engine and ends it again. Under three minutes beside the engine's start.
    """
    deployment = read_deployment(config, model=model)
    if DaemonClient(home).is_running():
        raise StateError(
            "a daemon runs, and its engines hold the machine; stop it with `batchrun down` first"
        )
    check_nothing_runs(deployment, home)
    index = choose_engine(deployment, engine)
    path = output or profile_path(deployment, deployment.engines[index], home)
    home.create()
    prepare_file(path)
    with ProgressBar() as progress:
        measured = asyncio.run(calibrate_engine(deployment, home, index, progress))
    write_atomically(path, measured.profile.to_json().encode())
    document = {
        "path": str(path),
        "num_steps": measured.num_steps,
        "engine_start_s": measured.engine_start_s,
        "measuring_s": measured.measuring_s,
        "profile": json.loads(measured.profile.to_json()),
    }
    answer(document, *_lines(measured, path), as_json=as_json)


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
        is_papers = getattr(fitted.model, "name", None) == "echo"
        mark = ", chosen" if fitted is best else ", the paper's" if is_papers else ""
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
    online = f"no figures: {measured.without_online}"
    if (seen := profile.online) is not None:
        online = (
            f"TTFT p50 {seen.ttft_p50_s:.3f} s, p99 {seen.ttft_p99_s:.3f} s; TPOT p50 "
            f"{1e3 * seen.tpot_p50_s:.1f} ms, p99 {1e3 * seen.tpot_p99_s:.1f} ms "
            f"({seen.num_calls} calls alone, {seen.calls_per_s:.1f} a second)"
        )
    yield f"online     {online}"
    if seen is not None:
        outside = "not measured"
        if seen.outside_s is not None:
            outside_ms = 1e3 * seen.outside_s
            outside = f"{outside_ms:.1f} ms of a first token beside its steps: HTTP, tokenizer"
        yield f"outside    {outside}"
    yield f"profile    {path}"


MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 7 << 29
"""A machine of 4 GiB, less what its kernel keeps for itself."""
ATTACHED_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `mend` is what to do when it is not `ok`."""

    name: str
    ok: bool
    detail: str
    mend: str | None = None


def doctor(*, config: ConfigOption = None, home: HomeOption, as_json: JsonOption = False) -> None:
    """Look for what is missing on this machine. Exits 4 when something is."""
    deployment = read_deployment(config)
    findings = list(_findings(deployment, home))
    is_complete = all(finding.ok for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{'ok     ' if finding.ok else 'MISSING'} {finding.name}: {finding.detail}")
        if not finding.ok and finding.mend:
            shown.append(f"        mend it: {finding.mend}")
    document = {"ok": is_complete, "findings": [asdict(finding) for finding in findings]}
    answer(document, *shown, as_json=as_json)
    if not is_complete:
        sys.exit(BatchrunError.exit_code)


def _findings(deployment: Deployment, home: Home) -> Iterator[Finding]:
    version = sys.version.split()[0]
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("Python", is_known, version, "use Python 3.11, 3.12 or 3.13")
    yield _home_finding(home)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding(
        "memory", memory >= MIN_MEMORY_BYTES, f"{memory / 2**30:.0f} GiB", "use a larger machine"
    )
    yield Finding("GPU", True, "an NVIDIA GPU" if has_gpu() else "none: engines run on the CPU")
    client = DaemonClient(home, timeout_s=LOOK_WAIT_S)
    picture = _running(client)
    running = picture is not None
    silence = None if running else client.describe_silence()
    said = "running" if running else silence or "not running (`batchrun up -d`)"
    yield Finding("daemon", silence is None, said, "batchrun down, then batchrun up -d")
    progress = None if picture is None else picture["progress"]  # A standby tells none.
    for trouble in [] if progress is None else describe_parts(progress):
        mend = "see daemon.log; a part that is stuck is ended and started again by itself"
        yield Finding("progress", False, trouble, mend)
    for event in [] if progress is None else describe_past(progress):
        yield Finding("progress so far", True, event)
    for engine in [] if picture is None else picture["engines"]:
        said = describe_progress(engine)
        mend = "an engine that hangs is ended and started again by itself; daemon.log says when"
        name = f"progress of engine {engine['name']}"
        is_well = engine["stalled_s"] < SHOWN_STALL_S and not engine["ejected_s"]
        yield Finding(name, is_well, f"{engine['state']}{said}", mend)
    for index, config in enumerate(deployment.engines):
        yield _engine_finding(config, home)
        if config.is_ours and not running:
            port = config.port or default_port(deployment.listen, index)
            mend = f"end the program that holds port {port}, or set `port` of the engine"
            check = partial(check_port_free, "127.0.0.1", port)
            yield _checked(f"port of engine {config.name}", str(port), check, mend)
    models = {deployment.for_engine(each).model for each in deployment.engines if each.is_vllm}
    for model in sorted(models - set(TINY_MODELS)):
        mend = "correct `model` in batchrun.yaml; `model: tiny` needs none"
        yield _checked("model", model, partial(check_model, model), mend)
    if not running:
        mend = "end the program that holds the port, or choose another with `listen`"
        check = partial(check_gateway_port, deployment.listen)
        yield _checked("port of the gateway", deployment.listen, check, mend)


def _running(client: DaemonClient) -> dict[str, Any] | None:
    try:
        return client.get("/status")
    except DaemonUnavailableError:
        return None


def _home_finding(home: Home) -> Finding:
    try:
        home.create()
        free = shutil.disk_usage(home.path).free
    except (BatchrunError, OSError) as error:
        return Finding("home", False, str(error), "choose another folder with --home")
    detail = f"{home.path}, {free / 2**30:.1f} GiB free"
    return Finding("home", free >= MIN_FREE_BYTES, detail, "free some space, or use --home")


def _engine_finding(config: EngineConfig, home: Home) -> Finding:
    name = f"engine {config.name}"
    if config.attach is not None:
        mend = f"start the server, or correct `attach` of {name}"
        return _checked(name, config.attach, partial(_check_answers, config.attach), mend)
    if config.agent is not None:
        return Finding(name, True, f"by its agent at {config.agent}; `batchrun status` asks it")
    if config.ray is not None:
        return Finding(name, True, f"on Ray at {config.ray.address}; `batchrun status` shows it")
    if config.command is not None:
        program = config.command[0]
        found = shutil.which(program) is not None
        detail = program if found else f"there is no program {program}"
        return Finding(name, found, detail, f"correct `command` of {name}")
    return _vllm(name, engine_python(config, home), is_named=config.python is not None)


def _vllm(name: str, python: Path, *, is_named: bool) -> Finding:
    mend = f"batchrun engine install{'' if has_gpu() else ' --cpu'}"
    if is_named:
        mend = f"install vLLM there, or remove `python` of {name} and run: {mend}"
    try:
        build = find_vllm(python)
    except BatchrunError as error:
        return Finding(name, False, str(error), mend)
    if build is None:
        return Finding(name, False, f"no vLLM in {python}", mend)
    detail = f"vLLM {build.version} ({'CPU' if build.is_cpu else 'GPU'} build) in {python}"
    return Finding(name, build.is_cpu or has_gpu(), detail, mend)


def _check_answers(url: str) -> None:
    """Raises EngineError when no engine answers at `url`, ConfigError where that is none."""
    health = f"{normalise_url(url)}/health"
    try:
        with DIRECT.open(health, timeout=ATTACHED_WAIT_S):
            return
    except (OSError, ValueError) as error:
        raise EngineError(f"nothing answers at {health} ({error})") from error


def _checked(name: str, detail: str, check: Callable[[], None], mend: str | None = None) -> Finding:
    try:
        check()
    except BatchrunError as error:
        return Finding(name, False, str(error).partition("; ")[0], mend)
    return Finding(name, True, detail)
