import sys, json
from dataclasses import replace
import benchmarks.ablation as A
from benchmarks.ablation import Trial, SCENARIOS
from benchmarks.ablation_configs import Config

queue = sys.argv[1]
names = sys.argv[2].split(",")
seeds = [int(s) for s in sys.argv[3].split(",")]
blocks = [int(b) for b in sys.argv[4].split(",")]
old = A._plan


def plan(trial):
    p = old(trial)
    if trial.config.policy != "stock":
        p = replace(
            p, engine=replace(p.engine, settings={**p.engine.settings, "online_queue": queue})
        )
    return p


if queue != "default":
    A._plan = plan
if __name__ == "__main__":
    for n in names:
        for s in seeds:
            for b in blocks:
                r = A.measure(Trial(SCENARIOS[n], "noisy", Config("echo"), s, b, 0.0))
                print(
                    queue,
                    n,
                    s,
                    b,
                    *(
                        f"{k}={r[k]:.3f}" if r[k] is not None else None
                        for k in (
                            "slo_ttft",
                            "slo_tpot",
                            "slo_deadline",
                            "offline_tokens_per_s",
                            "ttft_p50_s",
                            "ttft_p99_s",
                            "ttft_max_s",
                            "tpot_p50_s",
                            "online_longest_wait_s",
                            "longest_gap_s",
                            "online_preemptions",
                        )
                    ),
                    flush=True,
                )
