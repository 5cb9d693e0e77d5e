"""What `status` prints of an engine that runs batchrun's scheduler."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


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
