"""The `engine` and `models` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchrun.cli.console import LateProgress, print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.options import HomeOption, JsonOption
from batchrun.config import load_home
from batchrun.engine import install_engine
from batchrun.engine.tiny_model import build_tiny_model
from batchrun.errors import InputError
from batchrun.wire import PolicyName

engine_app = typer.Typer(
    help="The engine's own environment, and how running engines schedule.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(
    help="Models for trying things out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@engine_app.callback()
def _engine() -> None:
    """The engine's own environment, and how running engines schedule."""


@models_app.callback()
def _models() -> None:
    """Models for trying things out."""


@engine_app.command()
def install(
    *,
    cpu: Annotated[bool, typer.Option("--cpu", help="vLLM built for CPU.")] = False,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Install vLLM into an environment of its own: the GPU build, or the locked CPU one."""
    home = load_home(home_path)
    home.create()
    with LateProgress() as progress:
        python = install_engine(home.engine_environment, cpu=cpu, progress=progress)
    if as_json:
        print_json({"python": str(python)})
    else:
        say(f"engine installed: {python}")


@engine_app.command(name="set")
def set_engines(
    *,
    policy: Annotated[
        PolicyName | None, typer.Option(help="Scheduling policy, from the next step on.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a step; less than vLLM was started with.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="First go back to what the engines were started with.")
    ] = False,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change how running engines schedule, until the daemon ends."""
    change: dict[str, object] = {"policy": None, "token_budget": None} if reset else {}
    if policy is not None:
        change["policy"] = policy
    if budget is not None:
        change["token_budget"] = budget
    if not change:
        raise InputError("nothing to change: give --policy, --budget or --reset")
    answer = DaemonClient(load_home(home_path)).post("/engines", change)
    if as_json:
        print_json(answer)
        return
    for name, now in answer["engines"].items():
        if now is None:
            say(f"engine {name}: does not listen now; it will be told when it does")
        else:
            say(f"engine {name}: policy {now['policy']}, {now['token_budget']:,} tokens a step")


@models_app.command()
def tiny(
    path: Annotated[Path, typer.Argument(help="Folder to write.")], *, as_json: JsonOption = False
) -> None:
    """Build a small model with random weights, the same bytes every time."""
    build_tiny_model(path)
    if as_json:
        print_json({"path": str(path)})
    else:
        say(f"{path}: a random Llama of 4 layers; its answers are noise")
