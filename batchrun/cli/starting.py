"""The `init` command, a folder in which `batchrun run` works at once, and `version`."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from batchrun import __version__
from batchrun.cli.console import print_json, say
from batchrun.cli.options import JsonOption
from batchrun.errors import InputError

SAMPLE_ROWS = 16

DEPLOYMENT_FILE = """\
# The deployment: what `batchrun up` and `batchrun run` start. Every key may be left out.

# A folder, a Hugging Face id, or `tiny`: a small model with random weights that batchrun builds
# itself, to try things out. Its answers are noise.
model: tiny

# Where your applications find the online endpoint (OpenAI's API, under /v1).
listen: 127.0.0.1:8000

# One engine that batchrun starts; vllm_args go to vLLM as they are. To use a vLLM server that
# runs already, write instead:   - attach: http://127.0.0.1:8001
engines:
  - vllm_args: []
"""

JOB_FILE = """\
# A batch job: rows in, one answer a row out.   batchrun run jobs/sample.yaml
name: sample
model: default                    # the model of batchrun.yaml

input:
  path: ../data/sample.parquet    # relative to this file; Parquet, JSONL or CSV
  id: id                          # a unique column; left out: the row number
  messages:                       # Jinja2 over the row's columns; what rows share comes first
    - role: user
      content: "{{ document }}\\n\\nQuestion: {{ question }}\\nAnswer:"

request: {max_tokens: 32, temperature: 0}

output:
  path: results/sample.parquet    # relative to the folder you call batchrun from
  keep: [question, answer]        # input columns to join back
"""


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write.")] = Path(),
    *,
    as_json: JsonOption = False,
) -> None:
    """Write batchrun.yaml, a job file and a small sample, so that `run` works at once."""
    from batchrun.datasets import write_sample

    texts = {"batchrun.yaml": DEPLOYMENT_FILE, "jobs/sample.yaml": JOB_FILE}
    data = folder / "data" / "sample.parquet"
    paths = [*(folder / name for name in texts), data]
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists already; init overwrites nothing")
    try:
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        write_sample("loogle", data, rows=SAMPLE_ROWS)
    except (OSError, InputError) as error:
        with suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{folder}: cannot be written: {reason}") from error
    names = [*texts, "data/sample.parquet"]
    if as_json:
        print_json({"written": [str(folder / name) for name in names]})
        return
    for name in names:
        say(str(folder / name))
    enter = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    say(f"next: {enter}batchrun run jobs/sample.yaml")


def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        say(f"batchrun {__version__}")
