"""The `doctor` command: what is missing on this machine, and the one command that mends it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from batchrun.cli.console import print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.options import ConfigOption, HomeOption, JsonOption
from batchrun.config import TINY_MODEL, Deployment, load_deployment, load_home
from batchrun.daemon.supervisor import default_port, engine_python
from batchrun.engine.probe import check_model, check_port_free, find_vllm, has_gpu
from batchrun.errors import BatchrunError
from batchrun.home import Home

MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 4 << 30


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
        if config.attach is None:
            yield _engine(engine_python(config, home), config.name)
            port = config.port or default_port(deployment.listen, index)
            if not running:
                yield _port(port, f"port of engine {config.name}")
    if deployment.model != TINY_MODEL:
        yield _checked("model", deployment.model, lambda: check_model(deployment.model))
    if not running:
        yield _port(int(deployment.listen.rsplit(":", 1)[1]), "port of the gateway")


def _home(home: Home) -> Finding:
    try:
        home.create()
        free = shutil.disk_usage(home.path).free
    except (BatchrunError, OSError) as error:
        return Finding("home", False, str(error), "choose another folder with --home")
    detail = f"{home.path}, {free / 2**30:.1f} GiB free"
    return Finding("home", free >= MIN_FREE_BYTES, detail, "free some space, or use --home")


def _engine(python: Path, name: str) -> Finding:
    kind = "" if has_gpu() else " --cpu"
    mend = f"batchrun engine install{kind}"
    try:
        build = find_vllm(python)
    except BatchrunError as error:
        return Finding(f"engine {name}", False, str(error), mend)
    if build is None:
        return Finding(f"engine {name}", False, f"no vLLM in {python}", mend)
    detail = f"vLLM {build.version} ({'CPU' if build.is_cpu else 'GPU'} build) in {python}"
    return Finding(f"engine {name}", build.is_cpu or has_gpu(), detail, mend)


def _port(port: int, what: str) -> Finding:
    mend = f"end the program that holds port {port}, or choose another"
    return _checked(what, str(port), lambda: check_port_free("127.0.0.1", port), mend)


def _checked(name: str, detail: str, check: Callable[[], None], mend: str | None = None) -> Finding:
    try:
        check()
    except BatchrunError as error:
        return Finding(name, False, str(error), mend)
    return Finding(name, True, detail)
