"""Starts and watches what outlives the daemon: the gateway and the managed engines.

The gateway reads two files: the engines, and the API keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from batchrun.config import TINY_MODELS, Deployment, SloConfig, split_listen
from batchrun.daemon.dispatcher import MODELS_S, OFFLINE_PRIORITY
from batchrun.daemon.engine_link import GONE, Engine, EngineLink, Slot, window_of
from batchrun.daemon.fleets import Fleets
from batchrun.daemon.plugin import (
    attached_key,
    channel_path,
    last_steps_path,
    num_renderers,
    package_env,
    plugin_env,
    read_or_make_key,
    read_or_make_nonce,
    scheduler_settings,
    slo_classes,
)
from batchrun.daemon.prices import profile_prices, speed_of, traits_of
from batchrun.engine import process
from batchrun.engine.agent.engine import AgentEngine, AgentWire
from batchrun.engine.agent.remote import AgentAddress
from batchrun.engine.command import AttachedSettings, ManagedSettings, check_port_free
from batchrun.engine.door import KEY_VARIABLE
from batchrun.engine.engine import AttachedEngine, ManagedEngine, watch_on
from batchrun.engine.sockets import EngineSockets
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.engine.tiny_vision_model import build_tiny_vision_model
from batchrun.engine_config import EngineConfig
from batchrun.errors import EngineError, InputError
from batchrun.files import absolute, short_path, write_atomically
from batchrun.home import Home
from batchrun.pool.row_queue import RowLoad
from batchrun.routing.engine_book import with_means
from batchrun.store.database import Store
from batchrun.types import EnginePhase

log = logging.getLogger(__name__)

GATEWAY_CHECK_S = 0.5
GATEWAY_START_S = 60.0
GATEWAY_ANSWER_S = 2.0
GATEWAY_PATIENCE_S = 60.0
"""One that was started anew answers nothing until it is there, on a busy machine for long."""
MAX_MISSED = 3
"""A gateway that is asked so often and answers nothing is stuck."""
GATEWAY_CLEAR_S = 3.0
"""Workers that are well have stopped listening within so long of their gateway's end."""
FIRST_ENGINE_PORT_OFFSET = 100
LAST_PORT = 65_535
CALL_TIMEOUTS = {"first_token", "between_tokens", "answer", "row"}
TINY_BUILDERS = dict(zip(TINY_MODELS, (build_tiny_model, build_tiny_vision_model), strict=True))


class Supervisor:
    """The engines and the gateway of one deployment.

    `daemon` is where the gateway finds the daemon (`url`), and what it shows there to be let in
    (`gateway_key`). `store` is a leader's.
    """

    def __init__(
        self,
        deployment: Deployment,
        home: Home,
        daemon: Mapping[str, str],
        store: Store | None = None,
    ) -> None:
        self._deployment = deployment
        self._home = home
        self._daemon = daemon
        self._upstreams = b""
        self._is_up = asyncio.Event()
        nonce = read_or_make_nonce(home) if deployment.runs_scheduler else None
        self.fleets = Fleets(deployment, home, store)
        made = [
            (slot, profile_prices(deployment, config, home))
            for index, config in enumerate(deployment.engines)
            for slot in self._make_slots(index, nonce if config.is_vllm else None)
        ]
        self.slots: Sequence[Slot] = [slot for slot, _ in made]
        self._prices = with_means([prices for _, prices in made])
        classes = slo_classes(deployment, home)
        self._slo_classes = {
            name: {**bounds.model_dump(), "value": deployment.slo_classes[name].value}
            for name, bounds in classes.items()
        }
        self._slo = deployment.slo.model_dump() if isinstance(deployment.slo, SloConfig) else None
        self.gateway_url = f"http://{deployment.listen}"
        self.leader_gateway: str | None = None
        """Of the daemon that leads, while this one stands by."""
        self.gateway_restarts = Counter({"stuck": 0, "ended": 0})
        """Since the daemon's start, by why."""

    def _make_slots(self, index: int, nonce: str | None) -> list[Slot]:
        """Those of a fleet, or the one of another engine; `nonce`: the secret of an engine that
        runs batchrun's scheduler."""
        config, fleets = self._deployment.engines[index], self.fleets
        if config.ray is not None:
            return [self._make_slot(config, each, nonce) for each in fleets.engines(config.name)]
        engine = make_engine(self._deployment, self._home, index, nonce)
        return [self._make_slot(config, engine, nonce)]

    def _make_slot(self, config: EngineConfig, engine: Engine, nonce: str | None) -> Slot:
        deployment, home = self._deployment, self._home
        prices = profile_prices(deployment, config, home)
        load = RowLoad(None if prices is None else speed_of(prices))
        is_alone = sum(len(each.replica_names) for each in deployment.engines) == 1
        models = () if is_alone else None
        expected_model = None if is_alone else deployment.first_model_of(config)
        if isinstance(engine, AgentEngine):
            return Slot(
                engine,
                config.uses_priority,
                link=EngineLink(AgentWire(engine.client), engine.name),
                window=window_of(deployment.window, runs_scheduler=True),
                load=load,
                models=models,
                expected_model=expected_model,
            )
        runs_scheduler = nonce is not None
        channel = channel_path(home, config.name)
        return Slot(
            engine,
            config.uses_priority,
            hint_nonce=nonce,
            link=EngineLink(EngineSockets(channel), config.name) if runs_scheduler else None,
            last_steps=last_steps_path(home, config.name) if runs_scheduler else None,
            window=window_of(deployment.window, runs_scheduler=runs_scheduler),
            load=load,
            models=models,
            expected_model=expected_model,
        )

    async def run(
        self, on_ready: Callable[[], None], leads: Callable[[], bool], *, is_heir: bool
    ) -> None:
        """Bring up the gateway, then all engines at once, and keep each up until cancelled, fleets
        while it surely `leads`. `on_ready` is called once, when an engine is ready.

        Raises EngineError when the gateway or no engine can start; an heir looks for them for ever.
        """
        self.fleets.start(self.slots, leads)
        for slot in self.slots:
            if slot.agent is not None:
                slot.agent.connect()
        await self._start_gateway()
        if any(config.is_vllm for config in self._deployment.engines):
            await asyncio.to_thread(build_model, self._deployment, self._home)
        silent = set[str]()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch_on("the gateway", self._watch_gateway))
                group.create_task(self._announce(on_ready))
                for slot in self.slots:
                    group.create_task(self._keep(slot, silent, is_heir=is_heir))
        except* EngineError as errors:
            for slot in self.slots:
                if isinstance(slot.engine, ManagedEngine) and slot.engine.has_spawned:
                    await slot.engine.stop()
            raise errors.exceptions[0] from None

    async def _keep(self, slot: Slot, silent: set[str], *, is_heir: bool) -> None:
        """Keep an engine up. `silent`: those that did not answer at first, and may yet."""
        try:
            await slot.engine.start()
        except EngineError as error:
            log.error("%s", error)
            if not slot.is_lost:
                silent.add(slot.engine.name)
            is_any_ready = any(each.engine.state is EnginePhase.READY for each in self.slots)
            has_none = all(each.is_lost or each.engine.name in silent for each in self.slots)
            if has_none and not (is_heir or is_any_ready):
                raise
        await watch_on(slot.engine.name, slot.engine.watch)

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await self._is_up.wait()
        on_ready()

    async def stand_by(self) -> None:
        """Keep the gateway up, and look at the engines that others start, until cancelled: another
        daemon leads. Raises EngineError when the gateway cannot start."""
        self.fleets.start(self.slots, None)
        await self._start_gateway()
        async with asyncio.TaskGroup() as group:
            for slot in self.slots:
                look = slot.engine.watch if slot.agent is None else slot.agent.watch_from_afar
                if not isinstance(slot.engine, ManagedEngine):
                    group.create_task(watch_on(slot.engine.name, look))
                    group.create_task(_ask_for_models(slot))
            group.create_task(watch_on("the gateway", self._watch_gateway))

    async def _start_gateway(self) -> None:
        self._write_upstreams()
        await asyncio.to_thread(self._ensure_gateway, is_first=True)
        await self._wait_for_gateway()

    async def close(self) -> None:
        """Close the connections to the engines; they and the gateway run on."""
        await self.fleets.close()
        for slot in self.slots:
            await slot.engine.client.close()

    async def _watch_gateway(self) -> None:
        num_missed, restarts, starts_until_s = 0, self.gateway_restarts, 0.0
        while True:
            if await asyncio.to_thread(self._ensure_gateway):
                restarts["ended"] += 1
                log.error("the gateway had ended; it is started again")
                starts_until_s = time.monotonic() + GATEWAY_PATIENCE_S
            if await self._does_gateway_answer():
                num_missed, starts_until_s = 0, 0.0
            elif time.monotonic() >= starts_until_s:
                num_missed += 1
            if num_missed >= MAX_MISSED:
                restarts["stuck"] += 1
                log.error("the gateway gives no answer; it is ended and started again")
                await asyncio.to_thread(process.kill_alone, self._home.gateway_process)
                await asyncio.to_thread(self._ensure_gateway)
                num_missed, starts_until_s = 0, time.monotonic() + GATEWAY_PATIENCE_S
                continue
            self._write_upstreams()
            await asyncio.sleep(GATEWAY_CHECK_S)

    async def _does_gateway_answer(self) -> bool:
        """Whether it takes a connection and says anything; of several workers, who watches them."""
        record = process.read_record(self._home.gateway_process)
        if record is None:
            return True
        with short_path(self._home.gateway_answers) as path:
            connect = partial(asyncio.open_connection, *split_listen(self._deployment.listen))
            if self._deployment.gateway_workers > 1:
                connect = partial(asyncio.open_unix_connection, path)
            return await process.answers(record, connect, within_s=GATEWAY_ANSWER_S)

    def _ensure_gateway(self, *, is_first: bool = False) -> bool:
        """Start the gateway unless it runs, and tell whether it had to be; the first time, its port
        must be free."""
        argv, log_path = self._gateway_argv(), self._home.log / "gateway.log"
        if process.adopt(self._home.gateway_process, argv) is not None:
            process.cut_log(log_path)
            return False
        if is_first:
            process.stop_recorded(self._home.gateway_process)
            check_gateway_port(self._deployment.listen)
        else:
            self._clear_gateway_port()
        # Not `-P`: a gateway of an older version would not be the same command.
        env, record_path = os.environ | {"PYTHONSAFEPATH": "1"}, self._home.gateway_process
        process.spawn(argv, env=env, log_path=log_path, record_path=record_path)
        return True

    def _clear_gateway_port(self) -> None:
        """Workers that a gateway left behind end their calls; those that listen on are ended."""
        for _ in range(round(GATEWAY_CLEAR_S / 0.05)):
            with suppress(EngineError):
                return check_gateway_port(self._deployment.listen)
            time.sleep(0.05)
        process.stop_recorded(self._home.gateway_process, 1.0)

    async def _wait_for_gateway(self) -> None:
        host, port = split_listen(self._deployment.listen)
        deadline = asyncio.get_running_loop().time() + GATEWAY_START_S
        while asyncio.get_running_loop().time() < deadline:
            record = process.read_record(self._home.gateway_process)
            if record is None or not process.is_alive(record):
                raise EngineError(self._gateway_failure())
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            await asyncio.sleep(0.1)
            if process.is_alive(record):
                return
        raise EngineError(self._gateway_failure())

    def _gateway_failure(self) -> str:
        path = self._home.log / "gateway.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"the gateway did not start: {last} (log: {path})"

    def _gateway_argv(self) -> list[str]:
        return [
            *(sys.executable, "-m", "batchrun.server.gateway"),
            *("--listen", self._deployment.listen),
            *("--upstreams", str(self._home.upstreams)),
            *("--keys", str(self._home.api_keys)),
            *("--workers", str(self._deployment.gateway_workers)),
            *("--answer-at", str(self._home.gateway_answers)),
        ]

    def _write_upstreams(self) -> None:
        for slot in self.slots:
            if slot.agent is not None:
                slot.hint_nonce = slot.agent.hint_nonce
        engines = [
            {
                "name": slot.engine.name,
                **_address_of(slot.engine),
                "is_last_choice": slot.is_set_apart
                or slot.is_draining
                or slot.engine.progress.is_doubtful,
                "is_hung": slot.engine.progress.is_hung,
                "is_ready": slot.engine.state is EnginePhase.READY,
                "is_gone": slot.engine.state in GONE,
                "hint_nonce": slot.hint_nonce,
                "offline_priority": OFFLINE_PRIORITY if slot.uses_priority else None,
                "models": slot.models,
                "started": slot.engine.started,
                "traits": traits_of(slot, prices),
            }
            for slot, prices in zip(self.slots, self._prices, strict=True)
            if slot.agent is None or slot.agent.base_url
        ]
        if any(engine["is_ready"] for engine in engines):
            self._is_up.set()
        timeouts = self._deployment.timeouts.model_dump(include=CALL_TIMEOUTS)
        document = {
            "engines": engines,
            "daemon": {**self._daemon, "leader_gateway": self.leader_gateway},
            "slo": self._slo,
            "slo_classes": self._slo_classes,
            "image_hosts": self._deployment.image_hosts,
            "router": self._deployment.router,
            "late_calls": self._deployment.late_calls,
            "timeouts": {f"{name}_s": value for name, value in timeouts.items()},
        }
        content = json.dumps(document).encode()
        if content != self._upstreams:
            write_atomically(self._home.upstreams, content, mode=0o600)
            self._upstreams = content
        for slot in self.slots:
            if not slot.is_set_apart:
                slot.apart_since_s = None
            elif slot.apart_since_s is None:
                slot.apart_since_s = time.monotonic()


def _address_of(engine: Engine) -> dict[str, object]:
    """Where gateways reach an engine, and with which key: through its agent, unless it is on this
    machine."""
    if not isinstance(engine, AgentEngine):
        return {"url": engine.client.base_url, "api_key": engine.client.api_key}
    if engine.direct_url is not None:
        return {"url": engine.direct_url, "api_key": engine.direct_key}
    address = engine.address
    certificate = None if address.certificate is None else str(address.certificate)
    secured = {"secret_file": str(address.secret_file), "certificate": certificate}
    return {"url": engine.client.base_url, "api_key": None, **secured}


async def _ask_for_models(slot: Slot) -> None:
    """Know which models the engine serves, for ever."""
    while True:
        with suppress(EngineError):
            slot.models = await slot.engine.client.models()
        await asyncio.sleep(MODELS_S)


def build_model(deployment: Deployment, home: Home) -> None:
    """Build the tiny models in the home that engines serve."""
    wanted = {deployment.for_engine(each).model for each in deployment.engines if each.is_vllm}
    for name in wanted & TINY_BUILDERS.keys():
        build, folder = TINY_BUILDERS[name], home.models / name
        try:
            build(folder)
        except InputError:
            # The folder is ours: an older batchrun built another tiny model there.
            shutil.rmtree(folder)
            build(folder)


def make_engine(
    deployment: Deployment,
    home: Home,
    index: int,
    hint_nonce: str | None = None,
    engine_key: str | None = None,
) -> Engine:
    """The engine of `deployment.engines[index]`, not started; with batchrun's scheduler in it
    where there is a `hint_nonce`. One that batchrun starts asks for `engine_key`, or else for what
    its `env` or the home has. Raises ConfigError when a secret cannot be read."""
    config = deployment.engines[index]
    if config.agent is not None:
        return AgentEngine(_agent_address(deployment, config, home))
    engine = _own_engine(deployment, home, index, hint_nonce, engine_key)
    engine.client.reply_idle_s = deployment.timeouts.between_tokens
    return engine


def make_managed(
    deployment: Deployment, home: Home, name: str, hint_nonce: str | None
) -> ManagedSettings | None:
    """How the engine of this name is to be started; None where batchrun does not start it, or not
    with batchrun's scheduler where it has a `hint_nonce`, or the other way round."""
    for index, config in enumerate(deployment.engines):
        runs_scheduler = deployment.runs_scheduler and config.is_vllm
        if config.name == name and config.is_ours and runs_scheduler == (hint_nonce is not None):
            engine = _own_engine(deployment, home, index, hint_nonce, None)
            return engine.settings if isinstance(engine, ManagedEngine) else None
    return None


def _own_engine(
    deployment: Deployment, home: Home, index: int, hint_nonce: str | None, engine_key: str | None
) -> ManagedEngine | AttachedEngine:
    config = deployment.engines[index]
    if config.attach is not None:
        return AttachedEngine(
            AttachedSettings(
                name=config.name, url=config.attach, api_key=attached_key(deployment, config)
            )
        )
    own = deployment.for_engine(config)
    is_tiny = own.model in TINY_MODELS
    key = engine_key or config.env.get(KEY_VARIABLE) or read_or_make_key(home, config.name)
    env = package_env(home) if hint_nonce is None else plugin_env(home, hint_nonce, config.name)
    return ManagedEngine(
        ManagedSettings(
            name=config.name,
            model=str(home.models / own.model) if is_tiny else own.model,
            served_model_name=own.model_name,
            adapters=deployment.adapters_of(config),
            port=config.port or default_port(deployment.listen, index),
            run_dir=home.run,
            log_dir=home.log,
            python=engine_python(config, home),
            url=config.url,
            vllm_args=config.vllm_args,
            env=(env if config.is_vllm else {}) | config.env,
            command=config.command,
            api_key=key,
            scheduler=None if hint_nonce is None else scheduler_settings(deployment, config, home),
            num_renderers=None if hint_nonce is None else num_renderers(deployment, config),
        )
    )


def _agent_address(deployment: Deployment, config: EngineConfig, home: Home) -> AgentAddress:
    assert config.agent is not None
    secret_file, certificate = (
        None if name is None else Path(absolute(deployment.base, name))
        for name in (config.secret_file, config.certificate)
    )
    return AgentAddress(
        name=config.name,
        url=config.agent,
        secret_file=secret_file or home.agent(config.name).agent_secret,
        certificate=certificate,
    )


def engine_python(config: EngineConfig, home: Home) -> Path:
    """The interpreter whose environment holds vLLM: named, installed by us, or this one."""
    if config.python is not None:
        return Path(config.python)
    installed = home.engine_environment / "bin" / "python"
    return installed if installed.exists() else Path(sys.executable)


def default_port(listen: str, index: int) -> int:
    """The port of the index-th engine where the deployment names none."""
    gateway_port = split_listen(listen)[1]
    offset = FIRST_ENGINE_PORT_OFFSET + index
    return gateway_port + offset if gateway_port + offset <= LAST_PORT else gateway_port - offset


def check_gateway_port(listen: str) -> None:
    """Raises EngineError when the gateway could not listen there."""
    host, port = split_listen(listen)
    check_port_free(host, port, instead="choose another: `listen` in batchrun.yaml, or --listen")
