"""`batchrun open`, and `batchrun metrics`: a board for Grafana, and alerts for Prometheus.

Every query here is run by a test against a Prometheus that scrapes a live deployment.
"""

from __future__ import annotations

import io
import json
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ruamel.yaml import YAML

from batchrun.cli.console import HomeOption, JsonOption, answer, command_group, out
from batchrun.control.client import DaemonClient
from batchrun.home import Home

metrics_app = command_group("A board for Grafana and alerts for Prometheus.")
PAGE_PATH = "/dashboard"


def open_page(*, home: HomeOption, as_json: JsonOption = False) -> None:
    """Print the address of the page, and open it where there is a browser."""
    url = page_url(home)
    answer({"url": url}, url, as_json=as_json)
    if not as_json and out.is_terminal:
        webbrowser.open(url)


def page_url(home: Home) -> str:
    """Where the page is. Raises DaemonUnavailableError."""
    gateway = str(DaemonClient(home).get("/status")["gateway"])
    for everywhere in ("//0.0.0.0:", "//[::]:"):
        gateway = gateway.replace(everywhere, "//127.0.0.1:")
    return gateway + PAGE_PATH


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture on the board: queries by what their legend says, in Grafana's `unit`."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    is_stacked: bool = False


def _quantile(share: float, latency: str) -> str:
    rate = f"rate(batchrun_gateway_{latency}_seconds_bucket[5m])"
    return f"histogram_quantile({share}, sum by (le, class) ({rate}))"


BOARD: Mapping[str, Sequence[Panel]] = {
    "Fleet": (
        Panel("Engines up", {"up": "sum(batchrun_engine_up)", "all": "count(batchrun_engine_up)"}),
        Panel("Offline work on, daemon up", {
            "offline work": "batchrun_offline_enabled", "daemon": "batchrun_daemon_up",
        }),
        Panel("Least slack of online calls", {
            "{{engine}}": "min_over_time(batchrun_slo_slack_seconds[1m])",
        }, "s"),
        Panel("Calls at the gateway", {
            "{{route}} {{status}}":
                "sum by (route, status) (rate(batchrun_gateway_calls_total[5m]))",
        }, "reqps"),
    ),
    "Jobs": (
        Panel("Rows to come", {"{{name}} {{job_id}}": 'batchrun_job_rows{state="pending"}'}),
        Panel("Failed rows", {"{{name}} {{job_id}}": 'batchrun_job_rows{state="failed"}'}),
        Panel("Until a job is done", {"{{name}} {{job_id}}": "batchrun_job_eta_seconds"}, "s"),
    ),
    "Online promises": (
        Panel("TTFT at the gateway", {
            "{{class}} p50": _quantile(0.5, "ttft"), "{{class}} p99": _quantile(0.99, "ttft"),
        }, "s"),
        Panel("TPOT at the gateway", {
            "{{class}} p50": _quantile(0.5, "tpot"), "{{class}} p99": _quantile(0.99, "tpot"),
        }, "s"),
        Panel("TTFT p99, as it was and alone", {
            "{{engine}}, alone: {{predicted_alone}}":
                'batchrun_online_latency_seconds{latency="ttft", quantile="0.99"}',
        }, "s"),
        Panel("Late calls, as callers feel it", {
            "{{engine}} {{latency}}": "rate(batchrun_gateway_late_calls_total[5m])"
                " / clamp_min(rate(batchrun_gateway_promised_calls_total[5m]), 1e-9)",
        }, "percentunit"),
        Panel("Late tokens", {
            "{{engine}}": "rate(batchrun_online_late_tokens_total[5m])"
                " / clamp_min(rate(batchrun_online_tokens_total[5m]), 1e-9)",
        }, "percentunit"),
    ),
    "Tide": (
        Panel("Computed tokens by class", {
            "{{class}}": "sum by (class) (rate(batchrun_computed_tokens_total[1m]))",
        }, is_stacked=True),
        Panel("Prefix hit rate", {
            "{{class}}": "sum by (class) (rate(batchrun_prefix_hit_tokens_total[5m]))"
                " / clamp_min(sum by (class) (rate(batchrun_prompt_tokens_total[5m])), 1e-9)",
        }, "percentunit"),
    ),
    "KV memory": (
        Panel("Blocks by use", {"{{engine}} {{state}}": "batchrun_kv_blocks"}, is_stacked=True),
        Panel("Reserve for online calls", {
            "{{engine}} reserve": "batchrun_kv_reserve_blocks",
            "{{engine}} capacity": "batchrun_kv_capacity_blocks",
        }),
    ),
    "Engines": (
        Panel("Requests running", {"{{engine}} {{class}}": "batchrun_requests_running"}),
        Panel("Requests waiting", {"{{engine}} {{class}}": "batchrun_requests_waiting"}),
        Panel("Preemptions", {
            "{{engine}} {{class}}": "rate(batchrun_preemptions_total[5m])",
        }, "ops"),
        Panel("Predicted of measured step time", {
            "{{engine}}": "rate(batchrun_step_predicted_seconds_total[5m])"
                " / clamp_min(rate(batchrun_step_measured_seconds_total[5m]), 1e-9)",
        }, "percentunit"),
        Panel("Rows in flight", {"{{engine}}": "batchrun_engine_rows"}),
    ),
    "Routing": (
        Panel("Calls by engine", {
            "{{engine}}": "rate(batchrun_gateway_engine_calls_total[5m])",
        }, "reqps"),
        Panel("Busiest engine of the mean", {
            "of the mean": "max(rate(batchrun_gateway_engine_calls_total[5m]))"
                " / clamp_min(avg(rate(batchrun_gateway_engine_calls_total[5m])), 1e-9)",
        }),
        Panel("Cached part of prompts by engine", {
            "{{engine}}": "rate(batchrun_gateway_engine_cached_tokens_total[5m])"
                " / clamp_min(rate(batchrun_gateway_engine_prompt_tokens_total[5m]), 1e-9)",
        }, "percentunit"),
    ),
}  # fmt: skip
"""The panels by row."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `query` has held for `for_`; `series` is what it looks at, which must be there."""

    name: str
    query: str
    for_: str
    severity: str
    summary: str
    series: str


ALERTS: Sequence[Alert] = (
    Alert(
        "BatchrunDaemonDown", "batchrun_daemon_up == 0", "2m", "warning",
        "The daemon does not answer: online calls go on, jobs stand still.",
        "batchrun_daemon_up",
    ),
    Alert(
        "BatchrunEngineDown", "batchrun_engine_up == 0", "2m", "critical",
        "Engine {{ $labels.engine }} does not answer.", "batchrun_engine_up",
    ),
    Alert(
        "BatchrunCallsFail",
        'sum(rate(batchrun_gateway_calls_total{status=~"5.."}[5m]))'
        " / clamp_min(sum(rate(batchrun_gateway_calls_total[5m])), 1e-9) > 0.05",
        "5m", "critical", "More than 5 % of the calls at the gateway fail.",
        "batchrun_gateway_calls_total",
    ),
    Alert(
        "BatchrunTokensLate",
        "rate(batchrun_online_late_tokens_total[10m])"
        " / clamp_min(rate(batchrun_online_tokens_total[10m]), 1e-9) > 0.05",
        "10m", "warning",
        "More than 5 % of the online tokens of engine {{ $labels.engine }} come late.",
        "batchrun_online_tokens_total",
    ),
    Alert(
        "BatchrunRowsFail",
        'sum by (job_id, name) (batchrun_job_rows{state="failed"})'
        ' / clamp_min(sum by (job_id, name) (batchrun_job_rows{state=~"completed|failed"}), 1)'
        " > 0.1",
        "1m", "warning", "More than a tenth of the rows of {{ $labels.name }} fail.",
        "batchrun_job_rows",
    ),
    Alert(
        "BatchrunPlansFail", "increase(batchrun_policy_errors_total[10m]) > 0", "1m", "warning",
        "The scheduler of engine {{ $labels.engine }} fails in its steps; vLLM's own order holds.",
        "batchrun_policy_errors_total",
    ),
)  # fmt: skip

WIDTH, HEIGHT, ACROSS = 8, 7, 3
"""Of a panel, in Grafana's units of 24 a row."""


@metrics_app.command()
def grafana() -> None:
    """Print a board for Grafana: import it, and choose your Prometheus."""
    print_text(json.dumps(board(), indent=2))


@metrics_app.command()
def rules() -> None:
    """Print alerts for Prometheus: a file for `rule_files`."""
    print_text(rule_file())


def print_text(text: str) -> None:
    """On stdout as it is, for a file."""
    out.print(text.rstrip("\n"), soft_wrap=True)


def board() -> dict[str, object]:
    """A dashboard in Grafana's JSON."""
    panels: list[dict[str, object]] = []
    y = 0
    for row, shown in BOARD.items():
        panels.append(
            {"type": "row", "title": row, "collapsed": False, "panels": [],
             "id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )  # fmt: skip
        for index, panel in enumerate(shown):
            place = {
                "x": index % ACROSS * WIDTH,
                "y": y + 1 + index // ACROSS * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_panel(panel, place, len(panels) + 1))
        y += 1 + -(-len(shown) // ACROSS) * HEIGHT
    return {
        "uid": "batchrun",
        "title": "batchrun",
        "tags": ["batchrun"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource",
                 "query": "prometheus"}
            ]
        },
        "panels": panels,
    }  # fmt: skip


def _panel(panel: Panel, place: Mapping[str, int], number: int) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom: dict[str, object] = {"fillOpacity": 5, "showPoints": "never"}
    if panel.is_stacked:
        custom |= {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": "ABCD"[i], "datasource": source, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def rule_file() -> str:
    """Alerts in Prometheus' YAML."""
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.query,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in ALERTS
    ]
    yaml, text = YAML(), io.StringIO()
    yaml.width = 1_000
    yaml.dump({"groups": [{"name": "batchrun", "rules": alerts}]}, text)
    return text.getvalue()
