"""How much KV an engine of this deployment has, as far as it is known without starting one."""

from __future__ import annotations

from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.inspect_study import KvSize
from batchrun.config import Deployment, EngineConfig
from batchrun.daemon.profiles import existing_profile
from batchrun.errors import ConfigError, DaemonUnavailableError
from batchrun.estimator import CalibrationProfile, profile_from_json
from batchrun.home import Home

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
