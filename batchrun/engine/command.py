"""The command line that starts vLLM's OpenAI server, for the CPU and the GPU build."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.engine.install import VllmBuild, check_model, find_vllm, has_gpu
from batchrun.errors import ConfigError, EngineError
from batchrun.hints import HINT_KEY
from batchrun.vllm_waiting import NAPPING, WAIT_VARIABLE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is letters, digits, dot, dash and underscore."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"engine name {name!r}: use 1 to 64 letters, digits, dots, dashes or underscores"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSettings:
    """An engine that batchrun starts, watches and ends.

    `model` is a folder or a hub id; `served_model_name` is the id callers use (default: `model`).
    `python` is the interpreter whose environment holds vLLM. `url`, when set, is the address by
    which to reach the engine instead of host and port (a recording proxy in front of it).
    `vllm_args` are passed through verbatim and win over ours; `env` is laid over this process's
    environment. `command`, when set, replaces the whole vLLM command line.
    `scheduler`, when set, puts batchrun's scheduler into vLLM, with these settings.
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
    vllm_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    scheduler: Mapping[str, object] | None = None
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    check_interval_s: float = 1.0
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 60.0
    healthy_reset_s: float = 60.0
    unresponsive_restart_s: float = 120.0
    max_failed_starts: int = 5

    def __post_init__(self) -> None:
        """Raises ConfigError when the name could not stand in a file name."""
        check_name(self.name)

    @property
    def base_url(self) -> str:
        """The address the client uses."""
        return self.url or f"http://{self.host}:{self.port}"

    @property
    def record_path(self) -> Path:
        """Where the process record stands."""
        return self.run_dir / f"engine-{self.name}.json"

    @property
    def log_path(self) -> Path:
        """Where the engine's own output goes."""
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
CPU_KV_CACHE_BYTES = 2 * 1024**3
_COMMON_ARGS = (
    "--scheduling-policy=priority",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
    "--max-model-len=auto",
)
_CPU_ARGS = ("--enforce-eager", "--dtype=float32")
_KV_SIZE_ARGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_DEFAULT_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_CPU_ENV = {WAIT_VARIABLE: NAPPING}


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run: arguments and the whole environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def prepare_command(settings: ManagedSettings) -> Command:
    """The command for an engine, after a look at what is on the machine. Blocking.

    Raises EngineError when its Python, vLLM, GPU or model is missing.
    """
    env = build_env(settings, os.environ)
    if settings.command is not None:
        return Command(settings.command, env)
    check_model(settings.model)
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
    return Command(argv, {**_CPU_ENV, **env} if build.is_cpu else env)


def build_argv(
    settings: ManagedSettings, build: VllmBuild, env: Mapping[str, str]
) -> tuple[str, ...]:
    """The argument list. The user's own arguments come last, so they win over ours."""
    model = Path(settings.model).expanduser()
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
        *settings.vllm_args,
    )


def build_env(settings: ManagedSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours without our own variables, and `settings.env` over it."""
    kept = {key: value for key, value in inherited.items() if not key.startswith("BATCHRUN_")}
    return {**_DEFAULT_ENV, **kept, **settings.env}


def _scheduler_args(settings: ManagedSettings) -> tuple[str, ...]:
    if settings.scheduler is None:
        return ()
    config = json.dumps({HINT_KEY: dict(settings.scheduler)})
    return (f"--scheduler-cls={SCHEDULER_CLASS}", f"--additional-config={config}")


def _cpu_args(settings: ManagedSettings, env: Mapping[str, str]) -> tuple[str, ...]:
    if _has_kv_size(settings.vllm_args) or env.get("VLLM_CPU_KVCACHE_SPACE"):
        return _CPU_ARGS
    return (*_CPU_ARGS, f"--kv-cache-memory-bytes={CPU_KV_CACHE_BYTES}")


def _has_kv_size(vllm_args: tuple[str, ...]) -> bool:
    names = {arg.split("=", 1)[0].replace("_", "-") for arg in vllm_args}
    return any(name in names for name in _KV_SIZE_ARGS)


def _server_module(build: VllmBuild) -> str:
    """vLLM's `vllm` command fails in its CPU build, and its server module moved in 0.32."""
    launcher = build.root / "entrypoints" / "launchers" / "api_server" / "entry.py"
    if launcher.is_file():
        return "vllm.entrypoints.launchers.api_server.entry"
    return "vllm.entrypoints.openai.api_server"
