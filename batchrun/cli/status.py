"""The `status` command: engines, with what their schedulers report, and jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.table import Table

from batchrun.cli.console import HomeOption, JsonOption, answer, figure, named_lines, out
from batchrun.control.following import SafeConsole, num_done
from batchrun.control.submitting import view_jobs
from batchrun.errors import StoreError
from batchrun.home import Home
from batchrun.types import JobState


def _telemetry_lines(seen: dict[str, Any]) -> dict[str, str]:
    """Hit rate, tokens/s, latency, slack, queues, KV, steps, in this order."""
    online, offline, slo, step = seen["online"], seen["offline"], seen["slo"], seen["step"]
    shares, tokens, seconds = "{:.1%}", "{:,.0f}", "{:.3f} s"
    lines = {
        "hit rate": f"offline {figure(offline['hit_rate'], shares)}, "
        f"online {figure(online['hit_rate'], shares)}",
        "computed tokens/s": f"offline {figure(offline['computed_tokens_per_s'], tokens)}, "
        f"online {figure(online['computed_tokens_per_s'], tokens)}",
        "online TTFT": _with_and_without(seen, "mean_ttft_s"),
        "online TPOT": _with_and_without(seen, "mean_tpot_s"),
        **_cost_lines(seen["cost"]),
        "slack": f"{figure(slo['slack_s'], seconds)}; first tokens in time "
        f"{figure(slo['ttft_attainment'], shares)}, all tokens "
        f"{figure(slo['token_attainment'], shares)}",
        "online": _queue(online),
        "offline": _queue(offline),
        "KV blocks": _kv(seen["kv"]),
        "steps": f"{step['num_steps']:,}; predicted time "
        f"{figure(step['predicted_over_measured'], shares)} of measured",
        "in force": f"policy {seen['policy']}, order {seen['online_queue']}, "
        f"{seen['token_budget']:,} tokens a step, "
        f"offline work {'on' if seen['is_offline_on'] else 'off'}",
    }
    num_overdue, num_left_out = slo.get("num_overdue"), slo.get("num_left_out")
    if num_overdue or num_left_out:
        lines["overload"] = (
            f"{num_overdue or 0:,} of {online['num_waiting']:,} waiting calls are past their "
            f"bound, {num_left_out or 0:,} cannot be in time: there are more than this engine can "
            "serve in time"
        )
    faults = {
        "malformed hints": seen["num_malformed_hints"],
        "failed plans": seen["num_policy_errors"],
        "malformed orders": seen["num_malformed_orders"],
    }
    if any(faults.values()):
        lines["faults"] = ", ".join(f"{num:,} {name}" for name, num in faults.items() if num)
    return lines


def _promise_lines(engine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """How calls came to their callers in the last minutes, and what steps leave of the bounds."""
    told, margin = engine["promises"], engine["telemetry"]["margin"]
    if told is not None:
        firsts, answers = (
            figure(1 - told[f"num_late_{name}"] / num if num else None, "{:.1%}")
            for name in ("first", "answers")
            for num in [told[f"num_{name}"]]
        )
        yield (
            "as callers feel it",
            f"TTFT in time {firsts}, TPOT {answers} of {told['num_first']:,} calls of the last 5 "
            f"minutes; beside rows {margin['ttft_s']:.3f} s of TTFT and {margin['tpot_s']:.3f} s "
            "of an answer are kept back",
        )


def _cost_lines(cost: dict[str, Any]) -> dict[str, str]:
    """Latencies of the last minutes beside those predicted for the same calls alone; an engine of
    an older batchrun tells none."""
    if not cost["num_calls"]:
        return {}
    dial = "" if cost["online_cost"] is None else f" (at most {cost['online_cost']:g} wanted)"
    lines = {"last 5 minutes": f"{cost['num_calls']:,} calls beside predicted alone{dial}"}
    for name in ("ttft", "tpot"):
        lines[f"  {name.upper()}"] = "; ".join(
            f"{share} {figure(cost[f'{name}_{share}_s'], '{:.3f} s')}, alone "
            f"{figure(cost[f'alone_{name}_{share}_s'], '{:.3f} s')}: "
            f"{figure(cost[f'{name}_{share}_ratio'], '{:.2f}')} times"
            for share in ("p50", "p99")
        )
    return lines


def _with_and_without(seen: dict[str, Any], latency: str) -> str:
    shared, alone = (figure(seen[part][latency], "{:.3f} s") for part in ("shared", "alone"))
    return f"{shared} with offline work, {alone} without"


def _queue(queue: dict[str, Any]) -> str:
    return (
        f"{queue['num_running']:,} running, {queue['num_waiting']:,} waiting "
        f"(longest {queue['longest_wait_s']:.1f} s), {queue['num_preemptions']:,} preempted so far"
    )


def _kv(kv: dict[str, Any]) -> str:
    free = f"{kv['free_blocks']:,} free"
    if kv["wanted_blocks"] is not None:
        tiers = {
            "wanted": "wanted_blocks",
            "online prefixes": "online_prefix_blocks",
            "finished online": "finished_online_blocks",
            "unneeded": "unneeded_blocks",
            "empty": "empty_blocks",
        }
        free += f" ({', '.join(f'{name} {kv[key]:,}' for name, key in tiers.items())})"
    return (
        f"{kv['total_blocks']:,}: online {kv['online_blocks']:,}, offline "
        f"{kv['offline_blocks']:,}, {free}; {kv['reserve_blocks']:,} meant for online"
    )


NO_DAEMON = "waiting for a daemon"
WATCH_INTERVAL_S = 1.0
MOST_ENDED = 20


def status(
    job: Annotated[str | None, typer.Argument(help="Show this job alone, in detail.")] = None,
    *,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Fill the screen until Ctrl-C; in a pipe, print news."),
    ] = False,
    is_all: Annotated[
        bool, typer.Option("--all", help=f"Show 1,000 jobs that have ended, not only {MOST_ENDED}.")
    ] = False,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Show engines and jobs: those that have not ended first, the newest before older ones."""
    most = None if is_all else MOST_ENDED
    if as_json or not watch:
        picture = view_jobs(home, job)
        answer(picture, _render(picture, job, most), as_json=as_json)
        return
    if out.is_terminal:
        _fill_screen(home, job, most)
    else:
        _print_changes(home, job, most)


@dataclass(frozen=True, slots=True)
class _Screen:
    """What fits of a picture into the terminal as it is now, with a line below that says so."""

    picture: RenderableType
    trouble: str | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.picture, options.update(height=None), pad=False)
        room = max(options.max_height - 1, 1)
        num_hidden = len(lines) - room
        for line in lines[:room]:
            yield from line
            yield Segment.line()
        yield from [Segment.line()] * -num_hidden
        now = time.strftime("%H:%M:%S")
        more = f"; {num_hidden} lines below, in a taller window" if num_hidden > 0 else ""
        foot = f"{now}  {self.trouble or 'Ctrl-C leaves'}{more}"
        yield Segment(foot[: options.max_width], Style(reverse=True))


def _fill_screen(home: Home, job: str | None, most: int | None) -> None:
    """Keep the terminal's other screen up to date until Ctrl-C, which brings the first one back."""
    shown = _render(view_jobs(home, job), job, most)
    console = SafeConsole(highlight=False, markup=False, emoji=False)
    with Live(_Screen(shown, None), console=console, screen=True, refresh_per_second=4) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            trouble = None
            try:
                shown = _render(view_jobs(home, job), job, most)
            except StoreError as error:
                trouble = str(error)
            live.update(_Screen(shown, trouble))


def _print_changes(home: Home, job: str | None, most: int | None) -> None:
    """For a file or a pipe: each picture that has another line, until Ctrl-C; a job's, until it
    has ended."""
    before = ""
    while True:
        picture = view_jobs(home, job)
        with out.capture() as captured:
            out.print(_render(picture, job, most))
        if captured.get() != before:
            before = captured.get()
            out.print(before)
        if job is not None and all(JobState(v["state"]).is_terminal for v in picture["jobs"]):
            return
        time.sleep(WATCH_INTERVAL_S)


def _head_lines(picture: dict[str, Any]) -> Iterator[str]:
    """Who leads, where callers go, and what holds up the daemon or the gateway."""
    if (known := picture["leadership"]) is not None:
        of = f" of {known['leader']}" if known["role"] == "standby" else ""
        yield f"{known['role']}{of}, term {known['term']}"
    if picture["gateway"] is not None:
        switch = "on" if picture["offline"] else "off"
        yield f"online endpoint {picture['gateway']}/v1, offline work {switch}"
    elif not picture["stalled"]:
        yield "no daemon runs; start one with `batchrun up -d`"
    if picture["stalled"]:
        yield f"stalled: {picture['stalled']}"
    if picture["progress"] is not None:
        yield from describe_parts(picture["progress"])
        yield from describe_past(picture["progress"])


def _render(picture: dict[str, Any], job: str | None, most_ended: int | None) -> RenderableType:
    parts: list[RenderableType] = [*_head_lines(picture)]
    for engine in picture["engines"]:
        busy = f", {engine['in_flight']} offline rows in flight" if engine["in_flight"] else ""
        stage = "" if engine["stage"] == engine["state"] else f" ({engine['stage']})"
        parts.append(
            f"engine {engine['name']} {engine['url']}: {engine['state']}{stage}{busy}"
            + describe_progress(engine)
        )
    parts += _fleet_lines(picture.get("fleets", ()))
    is_run = picture["gateway"] is not None
    if (routing := picture.get("routing")) is not None and routing["imbalance"] is not None:
        parts += [named_lines(_routing_lines(routing), "online calls by engine, the last 1,000")]
    if job is not None:
        for view in picture["jobs"]:
            parts += ["", named_lines(_details(view, is_run=is_run))]
    elif picture["jobs"]:
        parts += _job_list(picture, most_ended)
    else:
        parts.append("no jobs yet; add one with `batchrun submit FILE`")
    if picture.get("felt"):
        parts += ["", named_lines(_felt_lines(picture["felt"]), "calls of the last 5 minutes")]
    for engine in picture["engines"]:
        if engine["telemetry"] is not None:
            lines = [*_promise_lines(engine), *_telemetry_lines(engine["telemetry"]).items()]
            parts += ["", named_lines(lines, f"engine {engine['name']}")]
    return Group(*parts)


def _fleet_lines(fleets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How many replicas there are of each fleet, on which of Ray's nodes."""
    for fleet in fleets:
        num = fleet["replicas"]
        yield (
            f"fleet {fleet['name']} on Ray at {fleet['address']}: {num['ready']} of "
            f"{num['wanted']} replicas ready, {num['min']} to {num['max']} allowed"
        )
        advice, renewing = fleet["advice"] or {}, fleet["renewing"] or {}
        left, away = (", ".join(renewing.get(key, ())) for key in ("replicas", "waits_for"))
        roll = left and f"new settings, one at a time, for {left}{away and f'; waits for {away}'}"
        yield from (f"  {note}" for note in (advice.get("says"), fleet["trouble"], roll) if note)
        for node in fleet["nodes"]:
            has = ", ".join(node["replicas"]) or "no replica"
            state = "" if node["is_alive"] else "dead, "
            yield (
                f"  node {node['address']}: {state}{node['gpus']:g} GPUs, {node['cpus']:g} CPUs, "
                f"{has}"
            )


def _routing_lines(routing: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for each in routing["engines"]:
        yield (
            each["engine"],
            f"{each['num_calls']:,} calls, {figure(each['hit_rate'], '{:.0%}')} of their prompts "
            f"cached ({figure(each['agreement'], '{:.0%}')} as foretold), "
            f"{each['num_pieces']:,} pieces held",
        )
    yield "busiest", f"{routing['imbalance']:.2f} times the mean"


def _felt_lines(felt: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """How long streamed calls took as their callers felt it, by class; seen at the gateway."""
    for each in felt:
        name = each["latency"] + ("" if each["slo_class"] == "default" else f" {each['slo_class']}")
        half, most = (
            "above all bounds" if bound_s is None else f"within {bound_s:g} s"
            for bound_s in (each["p50_s"], each["p99_s"])
        )
        yield (
            name,
            f"{half} for half of {each['num_calls']:,} calls, {most} for 99%; "
            f"{each['mean_s']:.3f} s on average",
        )


SHOWN_STALL_S = 5.0
SHOWN_SILENCE_S = 10.0


def describe_parts(progress: dict[str, Any]) -> list[str]:
    """What holds up the daemon's writer and the gateway now; nothing where all is well."""
    parts = []
    if progress["writer_waits_s"] >= SHOWN_SILENCE_S:
        parts.append(f"results have waited for {progress['writer_waits_s']:.0f} s to be committed")
    if progress["gateway_silent_s"] >= SHOWN_SILENCE_S:
        parts.append(f"the gateway has not answered for {progress['gateway_silent_s']:.0f} s")
    return parts


def describe_past(progress: dict[str, Any]) -> Iterator[str]:
    """How often parts stood still or ended and were started anew, if they did."""
    if progress["num_loop_stalls"]:
        at = datetime.fromtimestamp(progress["last_loop_stall_at"]).strftime("%H:%M:%S")
        yield (
            f"the daemon's loop stood still so often since its start: "
            f"{progress['num_loop_stalls']}, for {progress['longest_loop_stall_s']:.0f} s at most, "
            f"the last time until {at}"
        )
    for what, key, log in (
        ("gateways that were started anew since the daemon's start", "gateway_restarts", "daemon"),
        (
            "workers of the gateway that were replaced since its start",
            "replaced_workers",
            "gateway",
        ),
    ):
        num = progress[key]
        if any(num.values()):
            yield f"{what}: {num['stuck']} were stuck, {num['ended']} had ended; see {log}.log"


def describe_progress(engine: dict[str, Any]) -> str:
    """What holds an engine up now, and how often it hung; nothing where all is well."""
    parts = []
    if engine["stalled_s"] >= SHOWN_STALL_S:
        parts.append(f", no progress for {engine['stalled_s']:.0f} s")
    if engine["ejected_s"]:
        parts.append(f", no calls for {engine['ejected_s']:.0f} s, because they failed")
    if engine["num_hangs"]:
        parts.append(f"; it has hung so often since the daemon's start: {engine['num_hangs']}")
    return "".join(parts)


SAID = {JobState.PAUSED, JobState.FAILED, JobState.EXPIRED}
"""States for which the list says why."""


def _job_list(picture: dict[str, Any], most_ended: int | None) -> Iterator[RenderableType]:
    """The table, why jobs stand still or failed, and how many are left out."""
    newest = picture["jobs"][::-1]
    is_ended = [JobState(view["state"]).is_terminal for view in newest]
    active = [view for view, ended in zip(newest, is_ended, strict=True) if not ended]
    ended = [view for view, ended in zip(newest, is_ended, strict=True) if ended]
    shown = active + ended[:most_ended]
    yield _job_table(shown, is_run=picture["gateway"] is not None)
    for view in shown:
        if view["reason"] and view["state"] in SAID:
            yield f"{view['id']} {view['state']}: {view['reason']}"
    num_more = picture["num_more_ended"]
    if most_ended is None and num_more:
        yield f"{num_more:,} more that ended earlier; `batchrun status JOB` shows one"
    elif len(shown) < len(newest):
        yield f"{len(newest) - len(shown) + num_more:,} more that have ended; --all shows them"


def _job_table(views: list[dict[str, Any]], *, is_run: bool) -> Table:
    """All digits have room: the hit rate and the speed give way where there is too little."""
    rows = [
        {
            "job": view["id"],
            "name": view["name"],
            "state": _state(view, is_run=is_run),
            "done": f"{view['num_completed']:,}",
            "failed": f"{view['num_failed']:,}",
            "rows": f"{view['num_rows']:,}",
            "%": f"{num_done(view) / view['num_rows']:.0%}" if view["num_rows"] else "-",
            "rows/s": f"{view['rows_per_s']:.1f}" if view["rows_per_s"] else "-",
            "ETA": _eta(view),
            "hit rate": figure(view["hit_rate"], "{:.0%}"),
        }
        for view in views
    ]
    words = {name: " ".join([name, *(row[name] for row in rows)]).split() for name in rows[0]}
    widths = {name: max(map(len, each)) for name, each in words.items()} | {"name": 6}
    widths["state"] = min(widths["state"], 10)
    for name in ("hit rate", "rows/s"):
        if sum(widths.values()) + 2 * len(widths) > out.width:
            del widths[name]
    table = Table(box=None, header_style="bold")
    for name, width in widths.items():
        is_text, is_whole = name in {"job", "name", "state"}, name not in {"name", "state", "ETA"}
        table.add_column(name, min_width=width, no_wrap=is_whole, overflow="fold")
        table.columns[-1].justify = "left" if is_text else "right"
    for row in rows:
        table.add_row(*(row[name] for name in widths))
    return table


def _state(view: dict[str, Any], *, is_run: bool) -> str:
    if not is_run and view["state"] in {JobState.VALIDATING, JobState.RUNNING}:
        return NO_DAEMON
    state = str(view["stage"] or view["state"])
    return f"{state}, late" if view["is_deadline_kept"] is False else state


def _details(view: dict[str, Any], *, is_run: bool) -> Iterator[tuple[str, str]]:
    error = view["estimate_error"]
    has_ended = JobState(view["state"]).is_terminal
    speed = (
        f"{view['rows_per_s']:.1f} rows/s, {view['computed_tokens_per_s']:,.0f} computed and "
        f"{view['served_tokens_per_s']:,.0f} served tokens/s"
    )
    best = view["best_hit_rate"]
    lines = {
        "job": f"{view['id']}  {view['name']}",
        "state": _state(view, is_run=is_run),
        "reason": view["reason"],
        "rows": f"{view['num_completed']:,} done, {view['num_failed']:,} failed, "
        f"{view['num_in_flight']:,} in flight, {view['num_rows']:,} in all",
        "cut off": f"{view['num_cut']:,} answers at the token limit" if view["num_cut"] else None,
        "speed": None if has_ended else speed,
        "ETA": None if has_ended else _eta(view),
        "cost so far": _cost(view),
        "hit rate": figure(view["hit_rate"], "{:.0%}")
        + ("" if best is None else f" (best possible {best:.0%})"),
        "estimates": f"prompt tokens were off by {error:.1%} on average" if error else None,
        "cached tokens": _cached(view),
        "deadline": view["deadline_outlook"],
        "output": view["output_path"],
        "told": _told(view),
    }
    return ((name, str(said)) for name, said in lines.items() if said is not None)


def _cost(view: dict[str, Any]) -> str:
    """Time of engines, and what it costs where a price is known."""
    money = "" if view["cost"] is None else f", which cost {view['cost']:,.2f}"
    return f"{view['engine_s'] / 3600:,.3f} engine-hours{money}"


def _told(view: dict[str, Any]) -> str | None:
    """How it went to tell `on_done` of the job's end."""
    telling = view["on_done"]
    if telling is None:
        return None
    tries = "" if telling["num_tries"] < 2 else f" at try {telling['num_tries']}"
    if telling["state"] == "delivered":
        return f"{telling['target']} took it{tries}: {telling['said']}"
    then = "; not tried again"
    if telling["next_at"] is not None:
        then = f"; tried again in {_duration(max(0.0, telling['next_at'] - time.time()))}"
    return f"{telling['target']} did not take it{tries}: {telling['said']}{then}"


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
