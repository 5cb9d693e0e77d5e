"""What the running daemon foretells of a job that was not submitted."""

from __future__ import annotations

from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.dry_run_figures import HOUR_S, EngineTime, Eta, Forecast
from batchrun.durations import duration
from batchrun.errors import DaemonUnavailableError
from batchrun.home import Home

NO_DAEMON = (
    "no daemon runs; one that has run offline work knows the pace, and --trace TRACE simulates it "
    "beside recorded calls"
)
NO_PACE = (
    "the daemon has seen no offline work yet; once rows have run it knows the pace, and "
    "--trace TRACE simulates it beside recorded calls"
)
NO_COST = "--profile PROFILE simulates it on an engine of its own"


def measured(home: Home, computed_tokens: int, weight: float) -> Forecast:
    """What the daemon foretells of so much work, by the pace that it has measured; unknown where
    no daemon runs, or has run nothing yet."""
    work = {"computed_tokens": computed_tokens, "weight": weight}
    daemon = DaemonClient(home)
    try:
        answer = daemon.post("/foretell", work)
        is_offline_on = daemon.get("/status")["offline"]
    except DaemonUnavailableError:
        return Forecast.unknown(NO_DAEMON, NO_COST)
    eta, tokens_per_s = answer["eta"], answer["computed_tokens_per_s"]
    if eta is None or not tokens_per_s:
        return Forecast.unknown(NO_PACE, NO_COST)
    num_engines = answer["num_engines"]
    rests_on = (
        f"{tokens_per_s:,.0f} computed tokens/s, measured over the last "
        f"{duration(answer['seen_s'])} on {_count(num_engines, 'engine')}; "
        f"{_count(answer['num_running_jobs'], 'job')} running now"
    )
    if not is_offline_on:
        rests_on += "; offline work is switched off, and waits until it is on again"
    hours = computed_tokens / tokens_per_s * num_engines / HOUR_S
    return Forecast(
        Eta(eta["expected_s"], eta["low_s"], eta["high_s"], "daemon", rests_on),
        EngineTime(hours, "daemon", "at the pace measured beside the calls"),
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
