"""The deployment: batchrun.yaml, BATCHRUN_* and flags, read once, checked and frozen."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from batchrun.engine_config import Argument, EngineConfig, Name, Url
from batchrun.errors import ConfigError, known_name
from batchrun.files import absolute, check_prefix
from batchrun.hints import MAX_BOUND_S, MAX_ONLINE_COST
from batchrun.home import DEFAULT_HOME, Home, check_store_url
from batchrun.media.hosts import checked_host
from batchrun.quantities import (
    checked_age,
    checked_duration,
    checked_listen,
    parse_duration_s,
    parse_optional_duration_s,
)
from batchrun.strict import Strict, load_strict
from batchrun.types import DEFAULT_CLASS, DEFAULT_MODEL


def _checked_store(store: SecretStr) -> SecretStr:
    check_store_url(store.get_secret_value())
    return store


def at_least_one(engines: tuple[object, ...]) -> tuple[object, ...]:
    if not engines:
        raise ValueError("must list an engine; left out, batchrun starts one")
    return engines


def _checked_class_name(name: str) -> str:
    if name == DEFAULT_CLASS:
        raise ValueError(f"{name!r} is the class of all other calls; its bounds stand under 'slo'")
    return name


Names = Mapping[str, Collection[str]]
"""The names that the value of a key may be, by key."""


def _checked_choice(name: str, info: ValidationInfo) -> str:
    """Whoever loads the file knows the names: this module sees no policy and no eviction order."""
    names: Names = info.context or {}
    key = info.field_name or ""
    return known_name(name, names[key]) if key in names else name


Choice = Annotated[str, AfterValidator(_checked_choice)]
Listen = Annotated[str, BeforeValidator(checked_listen)]
ANY_HOST = ("0.0.0.0", "[::]")
"""Listened on, all addresses of a machine."""
ClassName = Annotated[Name, AfterValidator(_checked_class_name)]
Age = Annotated[str, AfterValidator(checked_age)]
CompletionWindow = Annotated[str, AfterValidator(checked_duration)]
FilesUrl = Annotated[str, AfterValidator(check_prefix)]
StoreUrl = Annotated[SecretStr, AfterValidator(_checked_store)]
ImageHost = Annotated[str, AfterValidator(checked_host)]


TINY_MODEL = "tiny"
TINY_MODELS = (TINY_MODEL, "tiny-vision")
STOCK_POLICY = "vllm"
"""The policy of engines that run vLLM's own scheduler."""


Bound = Annotated[float, Field(gt=0, le=MAX_BOUND_S, allow_inf_nan=False)]


class SloConfig(Strict):
    """What every online call is promised, in seconds. Read by batchrun's scheduler (`policy`).

    `jct_s` is the time from arrival to the last token.
    """

    ttft_s: Bound = 1.0
    tpot_s: Bound = 0.05
    jct_s: Bound | None = None

    @model_validator(mode="after")
    def _completion_follows_the_first_token(self) -> SloConfig:
        if self.jct_s is not None and self.jct_s <= self.ttft_s:
            raise ValueError(f"jct_s must be more than ttft_s, which is {self.ttft_s:g}")
        return self


class SloClassConfig(Strict):
    """What calls of one class are promised, in seconds; what is left out is that of `slo`. Where
    not all can be in time, those of less `value` give way; that of calls without a class is 1."""

    ttft_s: Bound | None = None
    tpot_s: Bound | None = None
    jct_s: Bound | None = None
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def over(self, default: SloConfig) -> SloConfig:
        """All bounds of the class. Raises ValueError, one line, when they contradict each other."""
        bounds = default.model_dump() | self.model_dump(exclude_none=True, exclude={"value"})
        try:
            return SloConfig.model_validate(bounds)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(problem) from None


Slo = Annotated[
    Annotated[SloConfig, Tag("bounds")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "bounds"),
]
Reserve = Annotated[
    Annotated[float, Field(ge=0, lt=1), Tag("share")]
    | Annotated[Literal["forecast"], Tag("forecast")],
    Discriminator(lambda value: "forecast" if isinstance(value, str) else "share"),
]
OnlineCostFactor = Annotated[float, Field(gt=1, le=MAX_ONLINE_COST, allow_inf_nan=False)]


class WindowConfig(Strict):
    """The most offline work on each engine: rows that it does not run yet, and prompt tokens.

    None: as much as the engine's scheduler makes use of.
    """

    requests: Annotated[int, Field(ge=1, le=4096)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None


MAX_TIMEOUT_S = 30 * 86_400.0
Timeout = Annotated[float, BeforeValidator(parse_duration_s), Field(ge=1, le=MAX_TIMEOUT_S)]
JobTimeout = Annotated[
    float | None, BeforeValidator(parse_optional_duration_s), Field(ge=1, le=MAX_TIMEOUT_S)
]


class TimeoutsConfig(Strict):
    """How long it may take until something shows, in seconds or as durations such as 5m.

    Of a streamed call until its first token; of any reply from one piece to the next; of a call
    that is not streamed until its answer; of a row in all; of a job without a deadline of its own.
    """

    first_token: Timeout = Field(default="5m", validate_default=True)
    between_tokens: Timeout = Field(default="2m", validate_default=True)
    answer: Timeout = Field(default="1h", validate_default=True)
    row: Timeout = Field(default="24h", validate_default=True)
    job: JobTimeout = None


class OnDone(Strict):
    """What hears that a job has ended: a program that is run, or a URL that is called, with a
    signature if there is a secret in `secret_file`."""

    command: Annotated[tuple[Argument, ...], Field(min_length=1)] | None = None
    webhook: Url | None = None
    secret_file: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> OnDone:
        if (self.command is None) == (self.webhook is None):
            raise ValueError("takes either 'command' or 'webhook'")
        if self.secret_file is not None and self.webhook is None:
            raise ValueError("'secret_file' signs what a 'webhook' gets")
        return self

    def located(self, folder: Path) -> OnDone:
        """With absolute paths in place of those that are relative to `folder`."""
        command, secret_file = self.command, self.secret_file
        if command is not None and "/" in command[0]:
            command = (absolute(folder, command[0]), *command[1:])
        if secret_file is not None:
            secret_file = absolute(folder, secret_file)
        return self.model_copy(update={"command": command, "secret_file": secret_file})


def _as_on_done(value: object) -> object:
    return {"command": value} if isinstance(value, list | tuple) else value


OnDoneKey = Annotated[OnDone | None, BeforeValidator(_as_on_done)]
Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]
KeyLimit = Annotated[int, Field(gt=0, le=2**53)]
KeyCount = Annotated[int, Field(gt=0, lt=2**31)]


class KeyLimitsConfig(Strict):
    """What a user key may do that has no limit of its own; None: as much as it likes."""

    requests_per_minute: KeyCount | None = None
    concurrent_calls: KeyCount | None = None
    concurrent_batches: KeyCount | None = 100
    enqueued_tokens: KeyLimit | None = None
    stored_bytes: KeyLimit | None = 100 << 30


class DeploymentFile(Strict):
    """The keys of batchrun.yaml.

    `model` is a folder, a hub id, or `tiny` or `tiny-vision`: random models that batchrun builds,
    for trying out. `image_hosts` are those from which images are fetched for rows and calls.
    `policy` is that of batchrun's own scheduler in the engines that it starts; `vllm`: they run
    vLLM's scheduler, with its priorities. `online_queue`, `larry_alpha`, `eviction`, `reserve`,
    `forecast_rule` and `online_cost` are settings of that scheduler: `docs/scheduler.md` has their
    names. `gateway_url` is where other machines reach the gateway, if not at `listen`.
    """

    model: str = TINY_MODEL
    served_model_name: str | None = None
    listen: Listen = "127.0.0.1:8000"
    gateway_url: Url | None = None
    gateway_workers: Annotated[int, Field(ge=1, le=64)] = 1
    router: Choice = "cost"
    late_calls: Literal["serve", "refuse"] = "serve"
    engines: Annotated[tuple[EngineConfig, ...], AfterValidator(at_least_one)] = (EngineConfig(),)
    window: WindowConfig = WindowConfig()
    policy: Choice = "echo"
    online_queue: Choice = "auto"
    larry_alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1_000.0
    eviction: Choice = "next-use"
    reserve: Reserve = "forecast"
    forecast_rule: Choice = "growth"
    online_cost: OnlineCostFactor | None = None
    slo: Slo = SloConfig()
    slo_classes: dict[ClassName, SloClassConfig] = Field(default={})
    store: StoreUrl | None = None
    files: FilesUrl | None = None
    retention: Age | None = None
    image_hosts: tuple[ImageHost, ...] = ()
    completion_windows: Annotated[tuple[CompletionWindow, ...], Field(min_length=1)] = ("24h",)
    timeouts: TimeoutsConfig = TimeoutsConfig()
    on_done: OnDoneKey = None
    price_per_hour: Price | None = None
    key_limits: KeyLimitsConfig = KeyLimitsConfig()

    @model_validator(mode="after")
    def _engine_names_differ(self) -> DeploymentFile:
        names = [name for engine in self.engines for name in engine.replica_names]
        if len(set(names)) != len(names):
            raise ValueError("two engines have the same 'name'; give each its own")
        for key in ("agent", "attach"):
            urls = [getattr(engine, key) for engine in self.engines if getattr(engine, key)]
            twice = next((url for url in urls if urls.count(url) > 1), None)
            if twice is not None:
                raise ValueError(f"two engines have the same {key!r}, {twice}: one engine, twice")
        return self

    @model_validator(mode="after")
    def _fleets_share_no_port(self) -> DeploymentFile:
        """Ray may place any two of one address on one node."""
        taken: dict[str, frozenset[int]] = {}
        for engine in self.engines:
            if engine.ray is not None:
                others = taken.get(engine.ray.address, frozenset())
                if others & engine.ray.ports:
                    raise ValueError(
                        f"fleet {engine.name} has ports of another fleet at Ray "
                        f"{engine.ray.address}: give it 'port' {max(others) + 1} under 'ray'"
                    )
                taken[engine.ray.address] = others | engine.ray.ports
        return self

    @model_validator(mode="after")
    def _classes_make_sense(self) -> DeploymentFile:
        """With `slo: auto` that is known when the engines are started."""
        if isinstance(self.slo, SloConfig):
            for name, bounds in self.slo_classes.items():
                try:
                    bounds.over(self.slo)
                except ValueError as error:
                    raise ValueError(f"slo_classes.{name}: {error}") from error
        return self


DEFAULT_FILE = "batchrun.yaml"
VERBATIM = re.compile(r"(on_done|engines\[\d+\]\.(name|vllm_args|env|command))\b")
"""Keys under which numbers are text as it stands there: `007` is not 7."""


class Environment(BaseSettings):
    """What BATCHRUN_* variables may set; flags come first, then these, then the file."""

    model_config = SettingsConfigDict(
        env_prefix="BATCHRUN_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    home: Path | None = None
    config: Path | None = None
    model: str | None = None
    listen: str | None = None
    gateway_url: str | None = None
    ray_address: str | None = None


class Deployment(DeploymentFile):
    """A resolved deployment. `base` is the folder that relative paths in the file start from,
    `file` the file itself where there is one."""

    base: Path
    file: Path | None = None

    @property
    def gateway_for_others(self) -> str:
        """The gateway's base URL for other machines."""
        if self.gateway_url is not None:
            return self.gateway_url.rstrip("/")
        host, port = self.listen.rsplit(":", 1)
        return f"http://{socket.gethostname() if host in ANY_HOST else host}:{port}"

    def first_model_of(self, config: EngineConfig) -> str | None:
        """What a vLLM of ours lists first; None where its arguments or others decide that."""
        is_from_model = config.is_vllm or (config.ray is not None and config.command is None)
        is_renamed = any(arg.startswith("--served-model-name") for arg in config.vllm_args)
        return self.for_engine(config).model_name if is_from_model and not is_renamed else None

    def serving(self, model: str) -> Deployment:
        """With those engines alone that have this model, or may; with all where none does."""
        asked = self.first_model_of(self.engines[0]) if model == DEFAULT_MODEL else model
        able = tuple(
            each
            for each in self.engines
            if asked is None or {asked, None} & {self.first_model_of(each), *each.adapters}
        )
        return self.model_copy(update={"engines": able or self.engines})

    def for_engine(self, config: EngineConfig) -> Deployment:
        """The deployment as this engine has it, with the engine's own model where it names one."""
        if config.model is None and config.served_model_name is None:
            return self
        own = {"model": config.model or self.model, "served_model_name": config.served_model_name}
        return _with_model_path(self.model_copy(update=own))

    def adapters_of(self, config: EngineConfig) -> dict[str, str]:
        """The LoRA adapters of an engine by name; one in a folder by its absolute path."""
        return {name: _as_path(self.base, where) for name, where in config.adapters.items()}

    def model_folder(self, home: Home, model: str | None = None) -> Path | None:
        """The folder with the files of the model that callers know by this name, if they are on
        this machine; it may be yet to come. None, and names of no engine's: the first engine's."""
        chosen = self.for_engine(self.engines[0])
        for config in self.engines:
            own = self.for_engine(config)
            if config.is_vllm and model in {own.model_name, *config.adapters}:
                chosen = own
                break
        if chosen.model in TINY_MODELS:
            return home.models / chosen.model
        folder = Path(absolute(chosen.base, chosen.model))
        return folder if folder.is_dir() else None

    @property
    def store_url(self) -> str | None:
        """The URL of the store's database, with its password; None for the file in the home."""
        return None if self.store is None else self.store.get_secret_value()

    @property
    def runs_scheduler(self) -> bool:
        """Whether engines that batchrun starts run its own scheduler."""
        return self.policy != STOCK_POLICY

    @property
    def model_name(self) -> str:
        """The model id that callers use."""
        if self.served_model_name is not None:
            return self.served_model_name
        return self.model if not Path(self.model).is_absolute() else Path(self.model).name


def load_home(flag: Path | None) -> Home:
    """The home folder: --home, else BATCHRUN_HOME, else ~/.local/state/batchrun."""
    chosen = flag or _environment().home
    try:
        return Home(chosen or DEFAULT_HOME)
    except RuntimeError:
        raise ConfigError(f"{chosen}: no user of this name; name another home folder") from None


def load_deployment(
    config: Path | None, names: Names | None = None, /, **flags: str | None
) -> Deployment:
    """Flags over BATCHRUN_* over the file (`config`, or ./batchrun.yaml when it exists).

    `names` are those that policies and the like may have; without them any are taken. Raises
    ConfigError with file, line and key.
    """
    environment = _environment(**{key: value for key, value in flags.items() if value is not None})
    path = config or environment.config
    if path is None and os.access(DEFAULT_FILE, os.F_OK):
        path = Path(DEFAULT_FILE)
    values: dict[str, Any] = {"base": Path.cwd() if path is None else path.absolute().parent}
    if path is not None:
        file = load_strict(path, DeploymentFile, ConfigError, context=names, verbatim=VERBATIM)
        values |= file.model_dump(exclude_unset=True) | {"file": path.absolute()}
    values |= environment.model_dump(include={"model", "listen", "gateway_url"}, exclude_none=True)
    if environment.ray_address is not None:
        values["engines"] = _at_ray(values.get("engines", ()), environment.ray_address)
    try:
        deployment = Deployment.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_line(error)) from error
    if deployment.on_done is not None:
        located = deployment.on_done.located(deployment.base)
        deployment = deployment.model_copy(update={"on_done": located})
    return _with_model_path(deployment)


def _at_ray(engines: Sequence[dict[str, Any]], address: str) -> tuple[dict[str, Any], ...]:
    """The engines, their fleets at this address. Raises ConfigError where there is none."""
    if not any(engine.get("ray") is not None for engine in engines):
        raise ConfigError("--ray-address: no engine has 'ray'; list one under `engines`")
    return tuple(
        engine | {"ray": engine["ray"] | {"address": address}} if engine.get("ray") else engine
        for engine in engines
    )


def _environment(**flags: Any) -> Environment:
    try:
        return Environment(**flags)
    except ValidationError as error:
        raise ConfigError(_first_line(error)) from error


def _with_model_path(deployment: Deployment) -> Deployment:
    """A model that is a folder beside the file becomes an absolute path."""
    if deployment.model in TINY_MODELS:
        return deployment
    return deployment.model_copy(update={"model": _as_path(deployment.base, deployment.model)})


def _as_path(base: Path, model: str) -> str:
    """The absolute path of what is a folder or looks like one; a hub id as it is."""
    folder = absolute(base, model)
    is_path = os.access(f"{folder}/", os.F_OK) or model.startswith((".", "/", "~"))
    return folder if is_path else model


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def split_listen(listen: str) -> tuple[str, int]:
    """Host (an IPv6 one without its brackets) and port of HOST:PORT."""
    host, port = listen.rsplit(":", 1)
    return host.strip("[]"), int(port)
