"""What commands share: results on stdout, progress and errors on stderr, common options."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from typer.core import TyperGroup

from batchrun.control.following import FILE_WIDTH_CHARS, SafeConsole
from batchrun.control.following import ProgressBar as ProgressBar
from batchrun.control.following import note as note
from batchrun.errors import UNSAFE, EngineError, InputError
from batchrun.files import write_atomically
from batchrun.home import Home

MAX_SENTENCE_CHARS = 400

out = SafeConsole(
    width=None if sys.stdout.isatty() else FILE_WIDTH_CHARS,
    soft_wrap=True,
    highlight=False,
    markup=False,
    emoji=False,
)


def answer(document: Mapping[str, object], *shown: RenderableType, as_json: bool) -> None:
    """What a command found, on stdout: one JSON object, or what is `shown` to people."""
    for each in (safe_json(document),) if as_json else shown:
        out.print(each)


def safe_json(document: object) -> str:
    """One line of JSON in which nothing stands that a terminal would obey, or stdout cannot say."""
    encoding = sys.stdout.encoding or "utf-8"
    text = json.dumps(document, ensure_ascii=not encoding.lower().startswith("utf"))
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def figure(value: float | None, template: str = "{:,}") -> str:
    """A number in words; a dash where it is unknown."""
    return "-" if value is None else template.format(value)


def columns(*headings: str, rows: Iterable[Iterable[str]]) -> Table:
    """A table with a heading above each column."""
    table = Table(*headings, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def named_lines(lines: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Names on the left, what is said of each on the right, folded where the terminal ends."""
    table = Table(box=None, show_header=False, title=title, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def prepare_file(path: Path) -> None:
    """Make the folder before minutes are spent. Raises InputError when nothing can be written."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path.with_name(f".{path.name}.probe"), b"")
        path.with_name(f".{path.name}.probe").unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _home(folder: str) -> Home:
    from batchrun.config import load_home

    return load_home(Path(folder) if folder else None)


class WholeGroup(TyperGroup):
    """Commands of a group, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of the commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, command.get_short_help_str(MAX_SENTENCE_CHARS))
            for name, command in commands
            if command is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command_group(words: str) -> typer.Typer:
    """A command that has commands of its own."""
    group = typer.Typer(
        help=words,
        cls=WholeGroup,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
    )
    group.callback()(lambda: None)
    return group


HomeOption = Annotated[
    Home,
    typer.Option(
        "--home",
        parser=_home,
        default_factory=str,
        show_default=False,
        metavar="<path>",
        help="Folder of the state. [default: ~/.local/state/batchrun]",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Deployment file. [default: ./batchrun.yaml when there is one]"),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Folder or hub id of the model to serve, or `tiny`.")
]
ListenOption = Annotated[
    str | None, typer.Option("--listen", help="HOST:PORT of the online endpoint.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
JobArgument = Annotated[str, typer.Argument(help="Job id, unique prefix of one, or job name.")]
JobFileArgument = Annotated[Path, typer.Argument(help="Job file (YAML).")]


@contextmanager
def vllm_needed(command: str, home: Home | None = None) -> Iterator[None]:
    """Around the import of what simulates. Where vLLM is missing, the whole command runs once more
    in the Python of the engines, and this does not return.

    Raises EngineError, one line, where that has no vLLM either.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"vllm", "torch"}:
            raise
        _run_beside_vllm(home or _home(""))
        raise EngineError(
            f"{command} runs vLLM's own scheduler, and vLLM cannot be imported here; run "
            "`batchrun engine install`, with --cpu where there is no GPU"
        ) from error


BESIDE_VLLM = """\
import json, sys
version, first, last = json.loads(sys.argv.pop(1))
if list(sys.version_info[:2]) != version:
    sys.exit("batchrun: the engines have Python %d.%d; run batchrun with it" % sys.version_info[:2])
sys.path[:0], sys.argv[0] = [first], "batchrun"
sys.path += last
from batchrun.cli.main import main
main()
"""
"""batchrun first, then all that vLLM was installed with, and of ours what is missing there."""


def _run_beside_vllm(home: Home) -> None:
    """Go on as this command in the Python of the engines; returns where that is this one, or has no
    vLLM. Raises ConfigError and EngineError."""
    from batchrun.control.starting import read_deployment
    from batchrun.daemon.plugin import plugin_folder
    from batchrun.daemon.supervisor import engine_python
    from batchrun.engine.command import find_vllm

    engine = next((each for each in read_deployment(None).engines if each.is_vllm), None)
    python = sys.executable if engine is None else str(engine_python(engine, home))
    if python == sys.executable or find_vllm(Path(python)) is None:
        return
    paths = json.dumps([sys.version_info[:2], str(plugin_folder(home)), sys.path])
    sys.stdout.flush()
    os.execv(python, [python, "-P", "-c", BESIDE_VLLM, paths, *sys.argv[1:]])
