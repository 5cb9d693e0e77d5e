"""The `status` command: engines, with what their schedulers report, and jobs."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batchrun.cli.client import DaemonClient
from batchrun.cli.console import HomeOption, JsonOption, out, print_json
from batchrun.config import load_home
from batchrun.errors import DaemonUnavailableError, UnknownJobError
from batchrun.home import Home


def engine_table(name: str, telemetry: dict[str, Any]) -> Table:
    """One compact block: hit rate, tokens/s, latency, slack, queues, KV, steps, in this order."""
    table = Table(box=None, show_header=False, title=f"engine {name}", title_justify="left")
    for key, value in _lines(telemetry).items():
        table.add_row(key, Text(value, overflow="fold"))
    return table


def _lines(told: dict[str, Any]) -> dict[str, str]:
    online, offline = told["online"], told["offline"]
    shared, alone, slo = told["shared"], told["alone"], told["slo"]
    return {
        "hit rate": f"offline {_pct(offline['hit_rate'])}, online {_pct(online['hit_rate'])}",
        "computed tokens/s": f"offline {_number(offline['computed_tokens_per_s'])}, "
        f"online {_number(online['computed_tokens_per_s'])}",
        "online TTFT": f"{_seconds(shared['mean_ttft_s'])} with offline work, "
        f"{_seconds(alone['mean_ttft_s'])} without",
        "online TPOT": f"{_seconds(shared['mean_tpot_s'])} with offline work, "
        f"{_seconds(alone['mean_tpot_s'])} without",
        "slack": f"{_seconds(slo['slack_s'])}; first tokens in time "
        f"{_pct(slo['ttft_attainment'])}, all tokens {_pct(slo['token_attainment'])}",
        "online": _queue(online),
        "offline": _queue(offline),
        "KV blocks": _kv(told["kv"]),
        "steps": f"{told['step']['num_steps']:,}; predicted time "
        f"{_pct(told['step']['predicted_over_measured'])} of measured",
        "in force": f"policy {told['policy']}, {told['token_budget']:,} tokens a step, "
        f"offline work {'on' if told['is_offline_on'] else 'off'}",
        **_faults(told),
    }


def _queue(told: dict[str, Any]) -> str:
    return (
        f"{told['num_running']:,} running, {told['num_waiting']:,} waiting "
        f"(longest {told['longest_wait_s']:.1f} s), {told['num_preemptions']:,} preempted so far"
    )


def _kv(kv: dict[str, Any]) -> str:
    free = f"{kv['free_blocks']:,} free"
    if kv["wanted_blocks"] is not None:
        parts = {
            "wanted": kv["wanted_blocks"],
            "online prefixes": kv["online_prefix_blocks"],
            "finished online": kv["finished_online_blocks"],
            "unneeded": kv["unneeded_blocks"],
            "empty": kv["empty_blocks"],
        }
        free += f" ({', '.join(f'{name} {number:,}' for name, number in parts.items())})"
    return (
        f"{kv['total_blocks']:,}: online {kv['online_blocks']:,}, offline "
        f"{kv['offline_blocks']:,}, {free}; {kv['reserve_blocks']:,} meant for online"
    )


def _faults(told: dict[str, Any]) -> dict[str, str]:
    counts = {
        "malformed hints": told["num_malformed_hints"],
        "failed plans": told["num_policy_errors"],
        "malformed orders": told["num_malformed_orders"],
    }
    found = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
    return {"faults": found} if found else {}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _pct(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


WATCH_INTERVAL_S = 1.0


def status(
    job: Annotated[str | None, typer.Argument(help="Show this job alone, in detail.")] = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show engines and jobs."""
    home = load_home(home_path)
    if as_json:
        print_json(_picture(home, job))
    elif not watch:
        out.print(_render(_picture(home, job), job))
    else:
        with Live(console=out, refresh_per_second=4) as live:
            while True:
                live.update(_render(_picture(home, job), job))
                time.sleep(WATCH_INTERVAL_S)


def _picture(home: Home, job: str | None) -> dict[str, Any]:
    """The daemon's snapshot, or what the store alone can tell."""
    try:
        picture = DaemonClient(home).get("/status")
    except DaemonUnavailableError:
        picture = {"gateway": None, "offline": None, "stalled": None, "engines": [], "jobs": []}
        if home.has_store:
            picture["jobs"] = _stored_jobs(home)
    if job is not None:
        wanted = [v for v in picture["jobs"] if v["id"].startswith(job) or v["name"] == job]
        if not wanted:
            raise UnknownJobError(f"{job}: no such job; `batchrun status` lists the jobs")
        picture["jobs"] = wanted
    return picture


def _stored_jobs(home: Home) -> list[dict[str, object]]:
    from batchrun.daemon.view import view_job
    from batchrun.store import jobs, results
    from batchrun.store.database import open_store

    store = open_store(home.store_location)
    try:
        records = jobs.list_jobs(store)
        return [view_job(r, results.count(store, r.seq)).to_json() for r in records]
    finally:
        store.close()


def _render(picture: dict[str, Any], job: str | None) -> RenderableType:
    parts: list[RenderableType] = []
    if picture["gateway"] is None:
        parts.append(Text("no daemon runs; start one with `batchrun up -d`"))
    else:
        switch = "on" if picture["offline"] else "off"
        parts.append(Text(f"online endpoint {picture['gateway']}/v1, offline work {switch}"))
    if picture["stalled"]:
        parts.append(Text(f"stalled: {picture['stalled']}"))
    parts += [_engine_line(engine) for engine in picture["engines"]]
    if job is not None:
        parts += [_detail(view) for view in picture["jobs"]]
    elif picture["jobs"]:
        parts.append(_job_table(picture["jobs"]))
    else:
        parts.append(Text("no jobs yet; add one with `batchrun submit FILE`"))
    for engine in picture["engines"]:
        if engine["telemetry"] is not None:
            parts += [Text(""), engine_table(engine["name"], engine["telemetry"])]
    return Group(*parts)


def _engine_line(engine: dict[str, Any]) -> Text:
    busy = f", {engine['in_flight']} offline rows in flight" if engine["in_flight"] else ""
    stage = "" if engine["stage"] == engine["state"] else f" ({engine['stage']})"
    return Text(f"engine {engine['name']} {engine['url']}: {engine['state']}{stage}{busy}")


def _job_table(views: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("job", min_width=14)
    table.add_column("name", overflow="fold")
    table.add_column("state", min_width=10)
    for heading in ("done", "failed", "rows", "rows/s", "ETA", "hit rate"):
        table.add_column(heading, justify="right")
    for view in views:
        table.add_row(
            view["id"],
            view["name"],
            _state(view),
            f"{view['num_completed']:,}",
            f"{view['num_failed']:,}",
            f"{view['num_rows']:,}",
            f"{view['rows_per_s']:.1f}" if view["rows_per_s"] else "-",
            _eta(view),
            _whole_pct(view["hit_rate"]),
        )
    return table


def _state(view: dict[str, Any]) -> str:
    state = str(view["stage"] or view["state"])
    return f"{state}, late" if view["is_deadline_kept"] is False else state


def _detail(view: dict[str, Any]) -> Table:
    lines = {
        "job": f"{view['id']}  {view['name']}",
        "state": view["stage"] or view["state"],
        "reason": view["reason"],
        "rows": f"{view['num_completed']:,} done, {view['num_failed']:,} failed, "
        f"{view['num_in_flight']:,} in flight, {view['num_rows']:,} in all",
        "speed": f"{view['rows_per_s']:.1f} rows/s, {view['computed_tokens_per_s']:,.0f} computed "
        f"and {view['served_tokens_per_s']:,.0f} served tokens/s",
        "ETA": _eta(view),
        "hit rate": f"{_whole_pct(view['hit_rate'])} "
        f"(best possible {_whole_pct(view['best_hit_rate'])})",
        "estimates": _estimates(view["estimate_error"]),
        "cached tokens": _cached(view),
        "deadline": view["deadline_outlook"],
        "output": view["output_path"],
    }
    table = Table(box=None, show_header=False)
    for key, value in lines.items():
        if value is not None:
            table.add_row(key, Text(str(value), overflow="fold"))
    return table


def _estimates(error: float | None) -> str | None:
    return None if not error else f"prompt tokens were off by {error:.1%} on average"


def _cached(view: dict[str, Any]) -> str | None:
    if view["cache_agreement"] is None:
        return None
    line = f"predicted and returned agree to {view['cache_agreement']:.0%}"
    if view["is_cached_less_than_planned"]:
        line += (
            "; the engine caches less than was planned: its prefix caching may be off, its KV "
            "small, or its chat template another than the model's"
        )
    return line


def _whole_pct(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _eta(view: dict[str, Any]) -> str:
    """The best guess, and from when to when it is likely."""
    expected = _duration(view["eta_s"])
    if view["eta_low_s"] is None:
        return expected
    return f"{expected} ({_duration(view['eta_low_s'])} to {_duration(view['eta_high_s'])})"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest_s:02}s"
