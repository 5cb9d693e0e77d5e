"""`batchrun engine serve`: the agent of one engine, here or in the background."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from pydantic import ValidationError

from batchrun.cli.console import ConfigOption, HomeOption, JsonOption, ModelOption, answer, note
from batchrun.config import Deployment, split_listen
from batchrun.control.starting import last_words, read_deployment
from batchrun.daemon.plugin import channel_path, last_steps_path, plugin_env
from batchrun.daemon.supervisor import build_model, engine_python, make_engine
from batchrun.engine import process
from batchrun.engine.agent.engine import AgentEngine
from batchrun.engine.agent.guard import HUNG_S
from batchrun.engine.agent.remote import ENGINE_KEY
from batchrun.engine.agent.server import Agent, AgentSettings
from batchrun.engine.command import check_port_free
from batchrun.engine.engine import ManagedEngine
from batchrun.engine_config import EngineConfig, checked_name
from batchrun.errors import BatchrunError, ConfigError, InputError, StateError
from batchrun.files import allow_many_open_files
from batchrun.home import Home
from batchrun.keys import is_loopback
from batchrun.mutual_tls import derive_token, read_or_make_secret, server_context

DEFAULT_LISTEN = "127.0.0.1:8100"
POLL_S = 0.1

ListenOption = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where daemon and gateways reach the agent.")
]
SecretOption = Annotated[
    Path | None,
    typer.Option(help="The secret that lets them in. [default: one is made in the home]"),
]


def _checked_name(name: str) -> str:
    try:
        return checked_name(name)
    except ValueError as error:
        raise InputError(f"--name {error}") from None


NameOption = Annotated[str, typer.Option(help="The engine's name.", callback=_checked_name)]


def serve(
    vllm_args: Annotated[
        list[str] | None, typer.Argument(help="After `--`: arguments for vLLM, verbatim.")
    ] = None,
    *,
    name: NameOption = "0",
    listen: ListenOption = DEFAULT_LISTEN,
    secret_file: SecretOption = None,
    attach: Annotated[
        str | None, typer.Option(metavar="URL", help="Stand beside a vLLM that runs already.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Show this certificate (PEM), not one of the secret.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The key of --certificate (PEM).")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when it listens.")
    ] = False,
    while_input: Annotated[
        bool, typer.Option("--while-input", help="End when standard input does.")
    ] = False,
    drain_s: Annotated[
        float,
        typer.Option("--drain-s", min=0, help="How long a SIGTERM lets calls and rows end."),
    ] = 0.0,
    model: ModelOption = None,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Run one engine with an agent beside it, for a daemon on this machine or another."""
    if key is not None and certificate is None:
        raise InputError("--key is that of --certificate: give both")
    deployment = _deployment_of(
        read_deployment(config, model=model, listen=listen), home, name, attach, vllm_args or []
    )
    host, port = split_listen(deployment.listen)
    if secret_file is None and not is_loopback(host):
        raise ConfigError(
            f"--listen {host} can be reached from other machines: give --secret-file, a file that "
            "the daemon's machine has too"
        )
    own, ready = home.agent(name), f"agent of engine {name}: https://{listen}"
    own.create()
    secret = read_or_make_secret(secret_file or own.agent_secret)
    if detach:
        _start_in_background(home, name, (host, port))
        answer({"name": name, "agent": f"https://{listen}"}, ready, as_json=as_json)
        return
    tls = server_context(secret, certificate, key)
    (engine_config,) = deployment.engines
    is_plain = not (deployment.runs_scheduler and engine_config.is_vllm)
    if engine_config.is_vllm:
        build_model(deployment, own)
    nonce = None if is_plain else derive_token(secret, "hints")
    engine = make_engine(deployment, own, 0, nonce, derive_token(secret, ENGINE_KEY))
    assert not isinstance(engine, AgentEngine)
    settings = AgentSettings(
        name=name,
        host=host,
        port=port,
        tls=tls,
        channel=channel_path(own, name),
        last_steps=last_steps_path(own, name),
        kept=own.path / "outcomes.db",
        log=engine.settings.log_path if isinstance(engine, ManagedEngine) else None,
        runs_scheduler=not is_plain,
        certificate=certificate,
        key=key,
        hung_s=HUNG_S,
    )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    allow_many_open_files()
    agent = Agent(engine, settings)
    uvloop.run(_run(agent, ready, drain_s, while_input=while_input))
    if agent.begins_anew:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def environment(
    *, name: NameOption = "0", secret_file: SecretOption = None, home: HomeOption
) -> None:
    """Print the variables that a vLLM of your own needs for `engine serve --attach`."""
    own = home.agent(name)
    own.create()
    secret = read_or_make_secret(secret_file or own.agent_secret)
    for variable, value in plugin_env(own, derive_token(secret, "hints"), name).items():
        typer.echo(f"export {variable}={shlex.quote(value)}")


def _start_in_background(home: Home, name: str, address: tuple[str, int]) -> None:
    """The same command without `--detach`, detached. Raises what made the agent give up."""
    record_path, log_path = home.agent_process(name), home.log / f"agent-{name}.log"
    earlier = process.read_record(record_path)
    if earlier is not None and process.is_alive(earlier):
        raise StateError(f"an agent of engine {name} runs already; `batchrun down` ends it")
    check_port_free(*address, instead="choose another: --listen")
    home.create()
    flags_end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    flags = [word for word in sys.argv[1:flags_end] if word not in {"--detach", "-d"}]
    log_size = log_path.stat().st_size if log_path.exists() else 0
    record = process.spawn(
        [sys.executable, "-P", "-m", "batchrun", *flags, *sys.argv[flags_end:]],
        env=dict(os.environ),
        log_path=log_path,
        record_path=record_path,
    )
    while process.is_alive(record):
        with suppress(OSError), socket.create_connection(address, timeout=POLL_S):
            return
        time.sleep(POLL_S)
    raise BatchrunError(last_words(log_path, log_size))


async def _run(agent: Agent, ready: str, drain_s: float, *, while_input: bool) -> None:
    """The first SIGTERM lets it drain, if it may; whatever comes then ends it at once."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def on_term() -> None:
        if draining or not drain_s:
            agent.stop()
        else:
            draining.append(loop.create_task(agent.drain(drain_s)))

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            loop.remove_reader(sys.stdin.fileno())
            agent.stop()

    if while_input:
        loop.add_reader(sys.stdin.fileno(), on_input)
    loop.add_signal_handler(signal.SIGTERM, on_term)
    loop.add_signal_handler(signal.SIGINT, agent.stop)
    await agent.run(on_listening=lambda: note(ready))


def _deployment_of(
    deployment: Deployment, home: Home, name: str, attach: str | None, vllm_args: list[str]
) -> Deployment:
    """A deployment of this one engine, as batchrun.yaml has it if it names one that batchrun starts
    itself."""
    named = [each for each in deployment.engines if each.name == name and each.is_ours]
    config = named[0] if named else EngineConfig(name=name)
    if attach is not None:
        if vllm_args or config.command is not None:
            raise InputError("--attach: that vLLM runs already; give its arguments to itself")
        try:
            config = EngineConfig(name=name, attach=attach)
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise InputError(f"--attach {said}") from None
    if config.is_vllm:
        arguments = (*config.vllm_args, *vllm_args)
        python = str(engine_python(config, home))
        config = config.model_copy(update={"vllm_args": arguments, "python": python})
    return deployment.model_copy(update={"engines": (config,)})
