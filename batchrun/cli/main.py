"""The `batchrun` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from batchrun.cli.console import note
from batchrun.errors import BatchrunError

INTERRUPTED = 130
COMMANDS = {
    "init": "starting:init",
    "up": "deployment:up",
    "down": "deployment:down",
    "run": "run:run",
    "submit": "jobs:submit",
    "status": "status:status",
    "results": "results:results",
    "errors": "results:errors",
    "cancel": "jobs:cancel",
    "pause": "jobs:pause",
    "resume": "jobs:resume",
    "offline": "jobs:offline",
    "inspect": "inspect:inspect",
    "doctor": "doctor:doctor",
    "datasets": "datasets:app",
    "models": "engine:models_app",
    "engine": "engine:engine_app",
    "version": "starting:version",
}


class LazyGroup(TyperGroup):
    """Imports the module of a command when it is asked for: `status` need not load pyarrow."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None when there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        target = getattr(import_module(f"batchrun.cli.{module}"), name)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="batchrun",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _batchrun() -> None:
    """Offline LLM batch jobs on the GPUs that serve your live traffic."""


def main() -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    try:
        app()
    except BatchrunError as error:
        note(f"batchrun: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        note("batchrun: interrupted")
        sys.exit(INTERRUPTED)
