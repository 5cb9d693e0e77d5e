"""The keys of batchrun.yaml: checked, frozen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from batchrun.config.values import (
    Age,
    Argument,
    ClassName,
    CompletionWindow,
    FilesUrl,
    Listen,
    Name,
    Port,
    StoreUrl,
    Url,
    at_least_one,
)

TINY_MODEL = "tiny"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineConfig(_Strict):
    """One engine. With `attach` it is a URL of a running vLLM; else batchrun starts it.

    `priority`: whether offline requests carry vLLM's `priority` field (needs
    `--scheduling-policy priority`, which managed engines get).
    """

    name: Name = "0"
    attach: Url | None = None
    api_key: str | None = Field(default=None, repr=False)
    priority: bool | None = None
    port: Port | None = None
    url: Url | None = None
    python: str | None = None
    vllm_args: tuple[Argument, ...] = ()
    env: dict[str, Argument] = {}
    command: Annotated[tuple[Argument, ...], Field(min_length=1)] | None = None
    profile: str | None = None

    @model_validator(mode="after")
    def _kinds_do_not_mix(self) -> EngineConfig:
        if self.attach is not None:
            for key in ("port", "url", "python", "vllm_args", "env", "command", "profile"):
                if getattr(self, key):
                    raise ValueError(f"{key!r} belongs to an engine that batchrun starts")
        elif self.api_key is not None:
            raise ValueError("'api_key' belongs to an engine with 'attach'")
        return self

    @property
    def is_vllm(self) -> bool:
        """Whether batchrun itself starts vLLM for this engine, from `model`."""
        return self.attach is None and self.command is None

    @property
    def uses_priority(self) -> bool:
        """Whether offline requests are sent with a lower priority than online ones."""
        return self.attach is None if self.priority is None else self.priority


Bound = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SloConfig(_Strict):
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


class SloClassConfig(_Strict):
    """What calls of one class are promised, in seconds; what is left out is that of `slo`."""

    ttft_s: Bound | None = None
    tpot_s: Bound | None = None
    jct_s: Bound | None = None

    def over(self, default: SloConfig) -> SloConfig:
        """All bounds of the class. Raises ValueError, one line, when they contradict each other."""
        bounds = default.model_dump() | self.model_dump(exclude_none=True)
        try:
            return SloConfig.model_validate(bounds)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(problem) from None


Slo = Annotated[
    Annotated[SloConfig, Tag("bounds")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "bounds"),
]
AUTO_SLO_FACTOR = 1.3
"""`slo: auto` promises so many times what online calls saw when the engine was calibrated."""


class WindowConfig(_Strict):
    """The most offline work on each engine: rows that it does not run yet, and prompt tokens.

    None: as much as the engine's scheduler makes use of.
    """

    requests: Annotated[int, Field(ge=1, le=4096)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None


class DeploymentFile(_Strict):
    """The keys of batchrun.yaml.

    `model` is a folder, a hub id, or `tiny`: a random model that batchrun builds, for trying out.
    `policy` is that of batchrun's own scheduler in the engines that it starts; `vllm`: they run
    vLLM's scheduler, with its priorities.
    """

    model: str = TINY_MODEL
    served_model_name: str | None = None
    listen: Listen = "127.0.0.1:8000"
    gateway_workers: Annotated[int, Field(ge=1, le=64)] = 1
    engines: Annotated[tuple[EngineConfig, ...], AfterValidator(at_least_one)] = (EngineConfig(),)
    window: WindowConfig = WindowConfig()
    policy: Literal["bs", "bs+e", "bs+e+s", "echo", "vllm"] = "echo"
    slo: Slo = SloConfig()
    slo_classes: dict[ClassName, SloClassConfig] = {}
    store: StoreUrl | None = None
    files: FilesUrl | None = None
    retention: Age | None = None
    completion_windows: Annotated[tuple[CompletionWindow, ...], Field(min_length=1)] = ("24h",)

    @model_validator(mode="after")
    def _engine_names_differ(self) -> DeploymentFile:
        names = [engine.name for engine in self.engines]
        if len(set(names)) != len(names):
            raise ValueError("two engines have the same 'name'; give each its own")
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
