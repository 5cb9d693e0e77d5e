"""An engine in batchrun.yaml: which of its kinds it is, and what is told of it."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from batchrun.strict import Strict

Port = Annotated[int, Field(ge=1, le=65535)]


def number_as_text(value: object) -> object:
    """`--max-model-len, 8192` in a list of arguments is text, whatever YAML makes of it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ValueError(f"must be a URL such as http://127.0.0.1:8001 (got {url!r})")
    return url


def _checked_agent(url: str) -> str:
    if urlsplit(_checked_url(url)).scheme != "https":
        raise ValueError(f"must be a URL such as https://10.0.0.7:8100 (got {url!r})")
    return url


def checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError(f"must be 1 to 64 letters, digits, dots, dashes or _ (got {name!r})")
    return name


Name = Annotated[str, BeforeValidator(number_as_text), AfterValidator(checked_name)]
Argument = Annotated[str, BeforeValidator(number_as_text)]
Url = Annotated[str, AfterValidator(_checked_url)]
AgentUrl = Annotated[str, AfterValidator(_checked_agent)]


def _switch_as_text(value: object) -> object:
    """Some readers of YAML take `on` and `off` for true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


MAX_REPLICAS = 512
LAST_PORT = 65_535
_KEYS_OF_OURS = ("port", "url", "python", "vllm_args", "env", "command", "profile")
_KEYS_OF_A_MACHINE = ("port", "url")
_KEYS_OF_VLLM = ("model", "served_model_name", "adapters")


class ReplicasConfig(Strict):
    """Between how many replicas a fleet has.

    `follow`: whether their number follows the calls; `dry` only says what it would be. A replica
    takes `start_s` until it is ready. While jobs have rows there are `offline_min` at least.
    """

    min: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    follow: Annotated[Literal["off", "dry", "on"], BeforeValidator(_switch_as_text)] = "off"
    start_s: Annotated[float, Field(gt=0, le=3600)] = 180.0
    offline_min: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0

    @model_validator(mode="after")
    def _max_is_not_less(self) -> ReplicasConfig:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max must be {self.min} at least, which is min")
        if self.offline_min > self.most:
            raise ValueError(f"offline_min must be {self.most} at most, which is max")
        if self.follow != "off" and self.most == self.min:
            raise ValueError("follow needs a max above min: the number is chosen between them")
        return self

    def allows(self, number: int) -> bool:
        """Whether there may be so many."""
        return number == self.nearest(number)

    def nearest(self, number: int) -> int:
        """The number that there may be which is closest to this one."""
        return min(max(number, self.min), self.most)

    @property
    def most(self) -> int:
        """The most that there may be."""
        return self.max or self.min


class RayConfig(Strict):
    """A fleet: engines with agents that Ray places on its nodes.

    `address` is Ray's own; `gpus` and `cpus` are what it sets aside for a replica, on one node.
    Agents listen on `port` and those that follow it, their engines on those that are 512 larger.
    """

    address: str = "auto"
    replicas: ReplicasConfig = ReplicasConfig()
    gpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1
    cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1
    port: Port = 8100

    @model_validator(mode="after")
    def _something_is_set_aside(self) -> RayConfig:
        if not self.gpus and not self.cpus:
            raise ValueError("give 'gpus' or 'cpus': Ray places a replica by what it needs")
        if self.gpus > 1 and not self.gpus.is_integer():
            raise ValueError("more than one of 'gpus' must be a whole number: Ray shares no second")
        return self

    @model_validator(mode="after")
    def _ports_are_there(self) -> RayConfig:
        """One for each agent, and one for each engine."""
        if self.port + MAX_REPLICAS + self.replicas.most - 1 > LAST_PORT:
            raise ValueError(f"port {self.port} leaves no room for those that follow it")
        return self

    @property
    def ports(self) -> frozenset[int]:
        """Those of its agents and of their engines."""
        firsts = (self.port, self.port + MAX_REPLICAS)
        return frozenset(first + each for first in firsts for each in range(self.replicas.most))


class EngineConfig(Strict):
    """One engine. With `attach` it is a URL of a running vLLM, with `agent` that of an agent beside
    one, with `ray` there are several, on Ray's nodes; else batchrun starts it.

    `model`, `served_model_name`: this engine's, where it is not that of all; `adapters` are LoRA
    adapters by the name that callers use. `priority`: whether offline requests carry vLLM's
    `priority` field (needs `--scheduling-policy priority`, which managed engines get).
    """

    name: Name = "0"
    attach: Url | None = None
    api_key: str | None = Field(default=None, repr=False)
    api_key_file: str | None = None
    agent: AgentUrl | None = None
    ray: RayConfig | None = None
    secret_file: str | None = None
    certificate: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    adapters: dict[Name, str] = Field(default={})
    priority: bool | None = None
    port: Port | None = None
    url: Url | None = None
    python: str | None = None
    vllm_args: tuple[Argument, ...] = ()
    env: dict[str, Argument] = Field(default={})
    command: Annotated[tuple[Argument, ...], Field(min_length=1)] | None = None
    profile: str | None = None

    @model_validator(mode="after")
    def _kinds_do_not_mix(self) -> EngineConfig:
        if self.attach is not None and self.agent is not None:
            raise ValueError("'attach' and 'agent' do not go together: an agent attaches")
        if self.ray is not None and not (self.attach is self.agent is None):
            raise ValueError("'ray' goes with neither 'attach' nor 'agent': Ray places agents")
        has_ray, has_agent = self.ray is not None, self.agent is not None
        for is_its, whose, keys in (
            (self.is_ours or has_ray, "an engine that batchrun starts", _KEYS_OF_OURS),
            (self.is_ours, "an engine that batchrun starts here", _KEYS_OF_A_MACHINE),
            (
                self.command is None and (self.is_ours or has_ray),
                "a vLLM that batchrun starts",
                _KEYS_OF_VLLM,
            ),
            (self.attach is not None, "an engine with 'attach'", ("api_key", "api_key_file")),
            (has_agent or has_ray, "an engine with 'agent' or 'ray'", ("secret_file",)),
            (has_agent, "an engine with 'agent'", ("certificate",)),
        ):
            for key in keys:
                if not is_its and getattr(self, key) not in (None, (), {}):
                    raise ValueError(f"{key!r} belongs to {whose}")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("'api_key' and 'api_key_file' do not go together; keep the file")
        return self

    @property
    def is_vllm(self) -> bool:
        """Whether batchrun itself starts vLLM for this engine, from `model`."""
        return self.is_ours and self.command is None

    @property
    def may_be_calibrated(self) -> bool:
        """Whether batchrun starts vLLM for it from `model`, here or where Ray places it."""
        return self.is_vllm or (self.ray is not None and self.command is None)

    @property
    def is_ours(self) -> bool:
        """Whether batchrun itself starts this engine's process, on this machine."""
        return all(each is None for each in (self.attach, self.agent, self.ray))

    @property
    def replica_names(self) -> tuple[str, ...]:
        """The engines of a fleet, as many as there may be; of others, the one."""
        if self.ray is None:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.ray.replicas.most))

    @property
    def uses_priority(self) -> bool:
        """Whether offline requests are sent with a lower priority than online ones."""
        return self.attach is None if self.priority is None else self.priority
