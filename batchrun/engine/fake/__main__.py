"""`python -m batchrun.engine.fake --port PORT`: the fake engine as a process of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from batchrun.engine.fake.script import RuleBook, load_rules
from batchrun.engine.fake.server import FakeSettings, build_app
from batchrun.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    options = _parse(arguments)
    try:
        rules = load_rules(options.script) if options.script else RuleBook(())
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    settings = FakeSettings(
        model=options.model,
        rules=rules,
        executions_path=options.executions,
        latency_s=options.latency_s,
        tokens_per_s=options.tokens_per_s,
        max_model_tokens=options.max_model_tokens,
    )
    web.run_app(
        build_app(settings),
        host=options.host,
        port=options.port,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        print=None,
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m batchrun.engine.fake", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="fake", help="the id of the model it serves")
    parser.add_argument("--script", type=Path, help="JSON file of faults (see script.py)")
    parser.add_argument("--executions", type=Path, help="append one JSON line per execution")
    parser.add_argument("--latency-s", type=float, default=0.0, help="before the first token")
    parser.add_argument("--tokens-per-s", type=float, default=None, help="default: at once")
    parser.add_argument("--max-model-tokens", type=int, default=8_192)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
