"""The `engine` and `models` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchrun.cli.console import LateProgress, print_json, say
from batchrun.cli.options import HomeOption, JsonOption
from batchrun.config import load_home
from batchrun.engine import install_engine
from batchrun.engine.tiny_model import build_tiny_model

engine_app = typer.Typer(
    help="The engine's own environment.",
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
    """The engine's own environment."""


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
