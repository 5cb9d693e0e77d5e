"""The command line that starts vLLM's OpenAI server, for the CPU and the GPU build."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchrun.engine.probe import VllmBuild, check_model, find_vllm, has_gpu
from batchrun.engine.settings import ManagedSettings
from batchrun.errors import EngineError
from batchrun.types import HINT_KEY
from batchrun.vllm_waiting import NAPPING, WAIT_VARIABLE

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
