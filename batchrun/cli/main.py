"""The `batchrun` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import sys

import typer

from batchrun import __version__
from batchrun.cli import (
    datasets,
    deployment,
    doctor,
    engine,
    inspect,
    jobs,
    results,
    run,
    starting,
    status,
)
from batchrun.cli.console import err, print_json, say
from batchrun.cli.options import JsonOption
from batchrun.errors import BatchrunError

INTERRUPTED = 130

app = typer.Typer(
    name="batchrun",
    help="Offline LLM batch jobs on the GPUs that serve your live traffic.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(starting.init)
app.command()(deployment.up)
app.command()(deployment.down)
app.command()(run.run)
app.command()(jobs.submit)
app.command()(status.status)
app.command()(results.results)
app.command()(results.errors)
app.command()(jobs.cancel)
app.command()(jobs.pause)
app.command()(jobs.resume)
app.command()(jobs.offline)
app.command()(inspect.inspect)
app.command()(doctor.doctor)
app.add_typer(datasets.app, name="datasets")
app.add_typer(engine.models_app, name="models")
app.add_typer(engine.engine_app, name="engine")


@app.command()
def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        say(f"batchrun {__version__}")


def main() -> None:
    """Run the command line; every failure is one line on stderr and an exit code."""
    try:
        app()
    except BatchrunError as error:
        err.print(f"batchrun: {error}", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("batchrun: interrupted", markup=False)
        sys.exit(INTERRUPTED)
