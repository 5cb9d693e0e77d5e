"""The `up`, `down`, `init` and `version` commands, and the daemon as a background process."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from batchrun import __version__
from batchrun.cli.console import (
    ConfigOption,
    HomeOption,
    JsonOption,
    ListenOption,
    ModelOption,
    answer,
    note,
)
from batchrun.config import Deployment
from batchrun.control.starting import (
    find_running,
    flags_of,
    read_deployment,
    stands_by,
    start_in_background,
    stop_everything,
)
from batchrun.engine.process import stop_recorded
from batchrun.errors import BatchrunError, InputError
from batchrun.files import DAEMON, StoreLock, check_limits
from batchrun.home import Home


def up(
    *,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")
    ] = False,
    model: ModelOption = None,
    listen: ListenOption = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="Where Ray is, for engines with `ray`.")
    ] = None,
    with_gateway: Annotated[
        bool,
        typer.Option(
            "--with-gateway",
            help="End on SIGTERM with the gateway, which ends its calls first: for containers.",
        ),
    ] = False,
    config: ConfigOption = None,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Start the daemon, the gateway and the engines (adopting those that still run)."""
    check_limits(DAEMON)
    said = {"model": model, "listen": listen, "ray_address": ray_address}
    reread = partial(read_deployment, config, **said)
    deployment = reread()
    if detach and with_gateway:
        raise InputError("--with-gateway is for `up` in the foreground; `batchrun down` ends all")
    if detach:
        picture = start_in_background(home, flags_of(config, **said))
        by = f"stands by; {picture['leadership']['leader']} leads, " if stands_by(picture) else ""
        answer(picture, f"{by}online endpoint {picture['gateway']}/v1", as_json=as_json)
    else:
        _run_here(reread, home, deployment.listen, with_gateway=with_gateway)


def down(*, home: HomeOption, as_json: JsonOption = False) -> None:
    """Stop the daemon, the gateway and the engines. Jobs stay, and go on with the next `up`."""
    stopped = stop_everything(home)
    shown = f"stopped: {', '.join(stopped)}" if stopped else "nothing was running"
    answer({"stopped": stopped}, shown, as_json=as_json)


def _run_here(
    reread: Callable[[], Deployment], home: Home, listen: str, *, with_gateway: bool
) -> None:
    from batchrun.server.api.process import Foreground, serve

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)  # Else a line for each of its plug-ins.
    ready = f"online endpoint http://{listen}/v1"
    home.create()
    before = find_running(home)
    try:
        after_s: dict[int, float] = {
            signal.SIGINT: STOP_ALL_S,
            signal.SIGTERM: GATEWAY_STOP_S * with_gateway,
        }
        ended_by = serve(reread, home, Foreground(lambda: note(ready), after_s))
    except BatchrunError:
        # What ran before goes on, and so does all of a daemon that runs.
        if sys.stdin.isatty() and StoreLock(home.store_lock).find_holder() is None:
            stop_everything(home, spared=before)
        raise
    if ended_by == signal.SIGINT:
        note("stopping the gateway and the engines too (jobs go on with the next `batchrun up`)")
        stop_everything(home)
    elif with_gateway:
        stop_recorded(home.gateway_process, GATEWAY_GRACE_S)


GATEWAY_GRACE_S, GATEWAY_STOP_S = 35.0, 45.0
"""More than its streams have to end, and than it then takes to end the gateway."""
STOP_ALL_S = 300.0
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
    from batchrun.samples.generators import write_sample

    texts = {"batchrun.yaml": DEPLOYMENT_FILE, "jobs/sample.yaml": JOB_FILE}
    data = folder / "data" / "sample.parquet"
    paths = [*(folder / name for name in texts), data]
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists already; init overwrites nothing")
    try:
        for path, text in zip(paths, texts.values(), strict=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        write_sample("loogle", data, rows=SAMPLE_ROWS)
    except (OSError, BatchrunError) as error:
        with suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{folder}: cannot be written: {reason}") from error
    enter = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    written = [str(path) for path in paths]
    following = f"next: {enter}batchrun run jobs/sample.yaml"
    answer({"written": written}, *written, following, as_json=as_json)


def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    answer({"version": __version__}, f"batchrun {__version__}", as_json=as_json)
