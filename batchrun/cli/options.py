"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of the state. [default: ~/.local/state/batchrun]"),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Deployment file. [default: ./batchrun.yaml when there is one]"),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Folder or hub id of the model to serve, or `tiny`."),
]
ListenOption = Annotated[
    str | None, typer.Option("--listen", help="HOST:PORT of the online endpoint.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
JobArgument = Annotated[str, typer.Argument(help="Job id, unique prefix of one, or job name.")]
JobFileArgument = Annotated[Path, typer.Argument(help="Job file (YAML).")]
