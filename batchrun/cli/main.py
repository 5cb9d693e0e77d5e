"""The `batchrun` command: its subcommands, and how errors leave it.

What it imports first is little, so that Ctrl-C is never a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from batchrun import __version__
from batchrun.cli.console import WholeGroup, note, out
from batchrun.errors import BatchrunError, InputError, suggestion
from batchrun.files import COMMAND, check_limits

INTERRUPTED = 130


def main() -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        exit_code = call()
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    sys.exit(exit_code)


COMMANDS = {
    "init": "operate.deployment:init",
    "up": "operate.deployment:up",
    "down": "operate.deployment:down",
    "run": "jobs:run",
    "submit": "jobs:submit",
    "status": "status:status",
    "results": "results:results",
    "errors": "results:errors",
    "cancel": "jobs:cancel",
    "pause": "jobs:pause",
    "resume": "jobs:resume",
    "offline": "jobs:offline",
    "logs": "operate.logs:logs",
    "inspect": "inspect:inspect",
    "calibrate": "operate.engine:calibrate",
    "keys": "operate.keys:keys_app",
    "trace": "data:trace_app",
    "simulate": "plan:simulate",
    "plan": "plan:plan",
    "store": "operate.store:store_app",
    "gc": "operate.store:gc",
    "open": "operate.monitoring:open_page",
    "metrics": "operate.monitoring:metrics_app",
    "doctor": "operate.engine:doctor",
    "datasets": "data:datasets_app",
    "models": "operate.engine:models_app",
    "engine": "operate.engine:engine_app",
    "version": "operate.deployment:version",
}


class LazyGroup(WholeGroup):
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with; a usage error that guesses what was meant."""
        if args and args[0] not in COMMANDS:
            ctx.fail(f"no such command {args[0]!r}{suggestion(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="batchrun",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        out.print(f"batchrun {__version__}")
        raise typer.Exit


@app.callback()
def _batchrun(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Offline LLM batch jobs on the GPUs that serve your live traffic."""


def call() -> int:
    """Run the command that the arguments name; returns its exit code, failures included."""
    try:
        check_limits(COMMAND)
        exit_code = app(prog_name="batchrun", standalone_mode=False)
    except BatchrunError as error:
        note(f"batchrun: {error}")
        return error.exit_code
    except typer.TyperException as error:
        note(_usage_line(error))
        return error.exit_code
    except OSError as error:
        note(_system_line(error))
        return BatchrunError.exit_code
    except ValueError:
        # Paths may be of any bytes; an argument that must be text fails where it is read as text.
        odd = next((each for each in sys.argv[1:] if not _is_text(each)), None)
        if odd is None:
            raise
        note(f"batchrun: {os.fsencode(odd)!r}: this argument is not UTF-8")
        return InputError.exit_code
    return exit_code if isinstance(exit_code, int) else 0


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _usage_line(error: typer.TyperException) -> str:
    """One line for a wrong call; the whole help when nothing at all was asked for."""
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None or message.startswith("Usage:"):
        return message
    message = " ".join(message.split())
    return f"batchrun: {message[:1].lower()}{message[1:]}; see `{context.command_path} --help`"


def _system_line(error: OSError) -> str:
    """One line for what the operating system refused."""
    place = "" if error.filename is None else f"{error.filename}: "
    advice = ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        advice = "; free some space, or choose another --home"
    return f"batchrun: {place}{error.strerror or error}{advice}"
