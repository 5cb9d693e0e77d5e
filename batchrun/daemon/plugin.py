"""What an engine needs to run batchrun's scheduler: package on its path, secret, profile."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from pathlib import Path

import batchrun
from batchrun.config import TINY_MODELS, Deployment, SloConfig
from batchrun.engine_config import EngineConfig
from batchrun.errors import ConfigError
from batchrun.estimator.profile import CalibrationProfile, OnlineLatency, profile_from_json
from batchrun.files import absolute, write_atomically
from batchrun.hints import AUTO_ONLINE_COST, HINT_NONCE_VARIABLE
from batchrun.home import Home
from batchrun.jobs.prompts.prompt_text import has_own_renderer
from batchrun.wire import CHANNEL_VARIABLE, SUFFIX


def profile_path(deployment: Deployment, config: EngineConfig, home: Home) -> Path:
    """The file named in the deployment, else one in the home.

    Engines of one model with the same arguments share it.
    """
    if config.profile is not None:
        return Path(absolute(deployment.base, config.profile))
    own = deployment.for_engine(config)
    content = json.dumps([own.model, config.vllm_args, config.python])
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", own.model_name)[:64]
    return home.profiles / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.json"


def existing_profile(deployment: Deployment, config: EngineConfig, home: Home) -> Path | None:
    """The file, where there is one. Raises ConfigError when one that is named is missing."""
    path = profile_path(deployment, config, home)
    if path.is_file():
        return path
    if config.profile is not None:
        raise ConfigError(
            f"engine {config.name}: there is no profile {path}; run `batchrun calibrate -o {path}`"
        )
    return None


def online_slo(deployment: Deployment, home: Home) -> SloConfig:
    """The SLO of online calls. With `auto` each engine learns its own while it runs; what is known
    before is `online_cost` times the slowest engine's p99 in its calibration, or the default.

    Raises ConfigError when `auto` has no engine that could learn.
    """
    if isinstance(deployment.slo, SloConfig):
        return deployment.slo
    managed = [config for config in deployment.engines if config.is_vllm]
    if not managed:
        raise ConfigError("slo: auto is for engines that batchrun starts; give ttft_s and tpot_s")
    shown = [_online_latency(deployment, config, home) for config in managed]
    known = [latency for latency in shown if latency is not None]
    if len(known) < len(shown):
        return SloConfig()
    cost = deployment.online_cost or AUTO_ONLINE_COST
    usual = SloConfig()
    return SloConfig(
        ttft_s=cost * max(each.ttft_p99_s for each in known) or usual.ttft_s,
        tpot_s=cost * max(each.tpot_p99_s for each in known) or usual.tpot_s,
    )


def slo_classes(deployment: Deployment, home: Home) -> dict[str, SloConfig]:
    """The bounds of each SLO class by its name. Raises ConfigError as `online_slo` does, and where
    the bounds of a class contradict each other."""
    runs_scheduler = deployment.runs_scheduler and any(e.is_vllm for e in deployment.engines)
    default = SloConfig() if isinstance(deployment.slo, str) else deployment.slo
    if deployment.slo_classes and runs_scheduler:
        default = online_slo(deployment, home)
    classes = {}
    for name, bounds in deployment.slo_classes.items():
        try:
            classes[name] = bounds.over(default)
        except ValueError as error:
            raise ConfigError(f"slo_classes.{name}: {error}") from error
    return classes


MAX_PROFILE_BYTES = 1 << 20


def read_profile(path: Path) -> CalibrationProfile:
    """A file of `batchrun calibrate`. Raises ConfigError, one line."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_PROFILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: the profile cannot be read: {reason}") from error
    return profile_from_json(text, str(path))


def _online_latency(
    deployment: Deployment, config: EngineConfig, home: Home
) -> OnlineLatency | None:
    path = existing_profile(deployment, config, home)
    return None if path is None else read_profile(path).online


OTHER_SETTINGS = {"online_queue", "larry_alpha", "eviction"} | {
    *("reserve", "forecast_rule", "online_cost")
}
"""Keys that reach the scheduler as they are, and only where they are set: so engines that an older
batchrun started keep their command line, and are adopted."""


def scheduler_settings(
    deployment: Deployment, config: EngineConfig, home: Home
) -> dict[str, object] | None:
    """The settings of batchrun's scheduler in an engine, or None when engines run vLLM's own.

    Raises ConfigError when a profile is wanted and missing.
    """
    if not deployment.runs_scheduler:
        return None
    profile = existing_profile(deployment, config, home)
    return {
        "policy": deployment.policy,
        **deployment.model_dump(include=OTHER_SETTINGS, exclude_unset=True),
        "slo": deployment.slo
        if isinstance(deployment.slo, str)
        else deployment.slo.model_dump(exclude_none=True),
        **({} if profile is None else {"profile": str(profile)}),
    }


NUM_RENDERERS = 2
RENDERER_ARGUMENT = re.compile("--(tokenizer|runner|convert|model-impl|hf-overrides|config)")
"""What begins so may choose another renderer than the model's files do."""


def num_renderers(deployment: Deployment, config: EngineConfig) -> int | None:
    """How many prompts an engine tokenizes at once, so that a call's is not behind a row's; None
    where it is not known that this is safe.

    vLLM gives each thread a tokenizer of its own only where a model has no renderer of its own:
    elsewhere one request's truncation can cut another's prompt. Pooling models may be refused.
    """
    arguments = [argument.replace("_", "-") for argument in config.vllm_args]
    if not deployment.runs_scheduler or any(map(RENDERER_ARGUMENT.match, arguments)):
        return None
    model = deployment.for_engine(config).model
    return NUM_RENDERERS if model in TINY_MODELS or _is_plain(Path(model)) else None


def _is_plain(folder: Path) -> bool:
    try:
        return folder.is_dir() and not has_own_renderer(folder)
    except (OSError, ValueError):
        # vLLM says what is wrong with the model.
        return False


def read_or_make_nonce(home: Home) -> str:
    """The secret that tells this home's hints from forged ones. It outlives daemon and engines."""
    if home.hint_nonce.exists():
        return home.hint_nonce.read_text()
    nonce = secrets.token_urlsafe(32)
    write_atomically(home.hint_nonce, nonce.encode(), mode=0o600)
    return nonce


def channel_path(home: Home, engine: str) -> Path:
    """Where the sockets of an engine's scheduler lie, without their endings."""
    return home.run / f"engine-{engine}"


def last_steps_path(home: Home, engine: str) -> Path:
    """Where an engine's scheduler writes down what it runs."""
    path = channel_path(home, engine)
    return path.with_name(path.name + SUFFIX)


METADATA = f"Metadata-Version: 2.1\nName: batchrun\nVersion: {batchrun.__version__}\n"
ENTRY_POINTS = "[vllm.general_plugins]\nbatchrun = batchrun.vllm_waiting:register\n"
"""As in pyproject.toml: vLLM finds there what its processes are to call."""


def plugin_folder(home: Home) -> Path:
    """A folder for the path of another environment, which then imports batchrun and nothing else
    of ours, and knows its entry point."""
    told = home.plugin / "batchrun-0.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    for name, text in (("METADATA", METADATA), ("entry_points.txt", ENTRY_POINTS)):
        write_atomically(told / name, text.encode())
    _link_package(home.plugin)
    return home.plugin


def _link_package(folder: Path) -> None:
    link, package = folder / "batchrun", Path(batchrun.__file__).parent
    if not link.is_symlink() or link.readlink() != package:
        link.unlink(missing_ok=True)
        link.symlink_to(package)


def attached_key(deployment: Deployment, config: EngineConfig) -> str | None:
    """What an attached engine asks for. Raises ConfigError when its file cannot be read."""
    if config.api_key_file is None:
        return config.api_key
    path = Path(absolute(deployment.base, config.api_key_file))
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        line = f"engine {config.name}: api_key_file: {path} cannot be read: {reason}"
        raise ConfigError(line) from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"engine {config.name}: api_key_file: {path} holds no key in one line")
    return key


def read_or_make_key(home: Home, engine: str) -> str:
    """The secret that an engine which batchrun starts asks for. It outlives daemon and engine."""
    path = home.engine_key(engine)
    if path.exists():
        return path.read_text()
    key = secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, key.encode(), mode=0o600)
    return key


def package_env(home: Home) -> dict[str, str]:
    """The environment variable that lets an engine in an environment of its own import batchrun,
    and nothing else of ours: a folder that holds it alone."""
    home.plugin.mkdir(parents=True, exist_ok=True)
    _link_package(home.plugin)
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(home.plugin), *([inherited] if inherited else [])])}


def plugin_env(home: Home, nonce: str, engine: str) -> dict[str, str]:
    """Environment variables for an engine with batchrun's scheduler: the nonce, where its sockets
    go, and `package_env`."""
    return {
        HINT_NONCE_VARIABLE: nonce,
        CHANNEL_VARIABLE: str(channel_path(home, engine)),
        **package_env(home),
    }
