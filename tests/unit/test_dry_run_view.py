"""What a dry run says of ETAs, deadlines and money."""

from __future__ import annotations

import io
import json
import math
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from batchrun.cli import dry_run
from batchrun.cli.dry_run import rendered
from batchrun.errors import BatchrunError
from batchrun.home import Home
from batchrun.jobs.spec import JobSpec
from batchrun.simulator.planner.job_forecast import (
    EngineTime,
    Eta,
    Forecast,
    Prediction,
    Price,
    study_figures,
)

INSPECTED = {
    "name": "sample",
    "endpoint": "/v1/completions",
    "rows": 10,
    "rows_with_template_errors": 0,
    "first_error": None,
    "prefix_groups": 2,
    "output_tokens_mean": 8.0,
    "output_tokens_source": "the limit in the job file",
    "max_output_tokens": 8,
    "expected_hit_rate": 0.5,
    "best_hit_rate": 0.6,
    "kv_tokens": 1_000,
    "kv_tokens_source": "the running engine",
    "rows_larger_than_kv": 0,
    "output_path": "out.jsonl",
}


def shown(
    eta: Eta,
    deadline_s: float | None,
    hours: float = 2.0,
    price: Price | None = None,
    **others: object,
) -> str:
    time = EngineTime(hours, "daemon", "measured")
    study = study_figures(INSPECTED | others, 1_000.0, 80.0)
    found = Prediction(study, deadline_s, Forecast(eta, time), price or Price())
    text = io.StringIO()
    Console(file=text, width=1_000).print(rendered(found))
    return text.getvalue()


def measured(expected_s: float, low_s: float, high_s: float) -> Eta:
    return Eta(expected_s, low_s, high_s, "daemon", "the pace")


@pytest.mark.parametrize(
    ("deadline_s", "line", "kept"),
    [
        (3_600.0, "1 h: kept\n", "kept"),
        (660.0, "11 min: kept, but not if all goes slowly", "kept"),
        (540.0, "9 min: missed by 1 min, but kept if all goes well", "missed"),
        (300.0, "5 min: missed by 5 min\n", "missed"),
    ],
)
def test_a_deadline_is_compared_with_the_whole_range(
    deadline_s: float, line: str, kept: str
) -> None:
    eta = measured(600.0, 480.0, 720.0)
    lines = "\n".join(line.rstrip() for line in shown(eta, deadline_s).splitlines()) + "\n"

    assert line in lines
    assert "10 min; in 9 of 10 cases 8 min to 12 min, beside today's load: the pace" in lines
    assert eta.keeps(deadline_s) is (kept == "kept")


def test_a_job_that_never_ends_misses_every_deadline_and_has_no_figure() -> None:
    never = Eta(math.inf, math.inf, math.inf, "simulation", "no time left")
    found = Prediction({}, 60.0, Forecast(never, EngineTime(None, None, "")), Price()).record()

    assert "never: no time left" in shown(never, 60.0)
    assert "1 min: missed" in shown(never, 60.0)
    assert (found["eta_s"], found["eta_high_s"], found["is_deadline_kept"]) == (None, None, False)


def test_a_simulated_range_is_said_to_be_that_of_the_trace() -> None:
    simulated = Eta(600.0, 480.0, 720.0, "simulation", "simulated")
    assert "10 min; 8 min to 12 min by when in the trace it comes: simul" in shown(simulated, None)


def test_computed_tokens_go_by_the_expected_hit_rate_and_else_by_the_best() -> None:
    assert study_figures(INSPECTED, 1_000.0, 80.0)["computed_tokens"] == 580
    unknown = INSPECTED | {"expected_hit_rate": None}
    assert study_figures(unknown, 1_000.0, 80.0)["computed_tokens"] == 480


def test_the_price_is_of_the_gpus_of_all_engine_hours() -> None:
    text = shown(measured(1.0, 1.0, 1.0), None, 2.0, Price.parse("1.25x4"))

    assert "at most 8.00 GPU-hours (2.00 engine-hours of 4 GPUs), which cost 10.00" in text


@pytest.mark.parametrize(("mean", "figure"), [(1_024.0, "1,024"), (7.234, "7.23")])
def test_the_length_of_answers_is_a_plain_figure(mean: float, figure: str) -> None:
    text = shown(measured(1.0, 1.0, 1.0), None, output_tokens_mean=mean)

    assert f"({figure} a row, from the limit in the job file" in text


def test_a_daemon_is_told_of_no_model_where_none_is_named(tmp_path: Path) -> None:
    told: list[object] = []

    class Older(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_error(404)

    home = Home(tmp_path)
    home.create()
    given = {"path": "in.jsonl", "messages": "{{ text }}"}
    spec = JobSpec.model_validate({"name": "x", "input": given, "output": {"path": "out.jsonl"}})
    with HTTPServer(("127.0.0.1", 0), Older) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        home.daemon_record.write_text(json.dumps({"pid": 1, "url": url, "token": "secret"}))
        Thread(target=server.handle_request).start()
        with pytest.raises(BatchrunError, match="404"):
            dry_run.measured(home, 1_000, spec)

    assert told == [{"computed_tokens": 1_000, "weight": 1.0}]
