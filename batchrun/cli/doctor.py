"""The `doctor` command: what is missing on this machine, and the one command that mends it."""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from batchrun.cli.console import print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.options import ConfigOption, HomeOption, JsonOption
from batchrun.config import (
    TINY_MODEL,
    Deployment,
    EngineConfig,
    load_deployment,
    load_home,
)
from batchrun.daemon.supervisor import check_gateway_port, default_port, engine_python
from batchrun.engine.probe import check_model, check_port_free, find_vllm, has_gpu
from batchrun.errors import BatchrunError, EngineError
from batchrun.home import Home

MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 4 << 30
ATTACHED_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `mend` is what to do when it is not `ok`."""

    name: str
    ok: bool
    detail: str
    mend: str | None = None


def doctor(
    *, config: ConfigOption = None, home_path: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Look for what is missing on this machine. Exits 4 when something is."""
    home = load_home(home_path)
    deployment = load_deployment(config)
    findings = list(_findings(deployment, home))
    missing = [finding for finding in findings if not finding.ok]
    if as_json:
        print_json({"ok": not missing, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            say(f"{'ok     ' if finding.ok else 'MISSING'} {finding.name}: {finding.detail}")
            if not finding.ok and finding.mend:
                say(f"        mend it: {finding.mend}")
    if missing:
        sys.exit(BatchrunError.exit_code)


def _findings(deployment: Deployment, home: Home) -> Iterator[Finding]:
    version = sys.version.split()[0]
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("Python", is_known, version, "use Python 3.11, 3.12 or 3.13")
    yield _home(home)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding(
        "memory", memory >= MIN_MEMORY_BYTES, f"{memory / 2**30:.0f} GiB", "use a larger machine"
    )
    yield Finding("GPU", True, "an NVIDIA GPU" if has_gpu() else "none: engines run on the CPU")
    running = DaemonClient(home).is_running()
    yield Finding("daemon", True, "running" if running else "not running (`batchrun up -d`)")
    for index, config in enumerate(deployment.engines):
        yield _engine_finding(config, home)
        if config.attach is None and not running:
            port = config.port or default_port(deployment.listen, index)
            mend = f"end the program that holds port {port}, or set `port` of the engine"
            check = partial(check_port_free, "127.0.0.1", port)
            yield _checked(f"port of engine {config.name}", str(port), check, mend)
    if deployment.model != TINY_MODEL and any(config.is_vllm for config in deployment.engines):
        mend = "correct `model` in batchrun.yaml; `model: tiny` needs none"
        yield _checked("model", deployment.model, partial(check_model, deployment.model), mend)
    if not running:
        mend = "end the program that holds the port, or choose another with `listen`"
        check = partial(check_gateway_port, deployment.listen)
        yield _checked("port of the gateway", deployment.listen, check, mend)


def _home(home: Home) -> Finding:
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
    """Raises EngineError when no engine answers at `url`."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=ATTACHED_WAIT_S):
            return
    except (OSError, ValueError) as error:
        raise EngineError(f"nothing answers at {url}/health ({error})") from error


def _checked(name: str, detail: str, check: Callable[[], None], mend: str | None = None) -> Finding:
    try:
        check()
    except BatchrunError as error:
        return Finding(name, False, str(error).partition("; ")[0], mend)
    return Finding(name, True, detail)
