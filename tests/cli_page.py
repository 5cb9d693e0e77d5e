"""The second half of docs/cli.md: what `--help` prints of every command, but what all have alike.

`python tests/cli_page.py` writes it again; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from batchrun.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
MARKER = "<!-- From here on, tests/cli_page.py writes this page. -->"
LINE_CHARS = 78
"""What an 80 column terminal leaves for the help text."""
SAID_ONCE = re.compile(r"^  --(?:home|json|help)\b.*\n?(?: {6,}.*\n?)*", re.MULTILINE)
"""Options that stand at the head of the page."""


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group with the words that call it, in the order of the help."""
    yield from _walk((), typer.main.get_command(app))


def help_of(words: tuple[str, ...]) -> str:
    """What `batchrun WORDS --help` prints on a terminal of 80 columns."""
    done = CliRunner().invoke(
        app, [*words, "--help"], prog_name="batchrun", terminal_width=LINE_CHARS
    )
    assert done.exit_code == 0, done.output
    return done.output.rstrip()


def page_of(words: tuple[str, ...]) -> str:
    """What the page has of it: each command of a group has a part of its own there."""
    alone, _, _ = help_of(words).partition("\nCommands:\n")
    return SAID_ONCE.sub("", alone + "\n").rstrip().removesuffix("Options:").rstrip()


def render() -> str:
    """The generated half of the page, from the marker on."""
    parts = [MARKER]
    for words, _ in commands():
        title = " ".join(("batchrun", *words))
        parts.append(f"### {title}\n\n```text\n{page_of(words)}\n```")
    return "\n\n".join(parts) + "\n"


def write() -> None:
    """Replace the generated half of the page."""
    by_hand, _, _ = PAGE.read_text().partition(MARKER)
    PAGE.write_text(by_hand + render())


def _walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    if hasattr(command, "list_commands"):
        context = command.make_context(None, [], resilient_parsing=True)
        for name in command.list_commands(context):
            yield from _walk((*words, name), command.get_command(context, name))


if __name__ == "__main__":
    write()
