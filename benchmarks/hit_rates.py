"""How good an order is: prefix hit rates on the virtual engine against the best possible.

    python -m benchmarks.hit_rates [--quick] [--seed N] [--processes N] [--json FILE]

Jobs shaped like four data sets, each alone and all four at once, through batchrun's scheduler from
their first row to their last: in batchrun's order, and in orders that others use. The hit rate is
that of first admissions; the optimum is the most that any order and any eviction can have with that
cache (`benchmarks.optimal_hits`). Online calls, where there are some, are those of the scenario
`a100-8b`. Engines start with observed step times, as after `batchrun calibrate`. See
`docs/hit-rates.md`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path

from benchmarks.hit_cases import Record, cases, measure
from benchmarks.hit_tables import bars, tables
from benchmarks.records import write_records


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two jobs, one KV size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    wanted = cases(options.seed, is_quick=options.quick)
    records: list[Record] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, record in enumerate(pool.imap(measure, wanted), start=1):
            records.append(record)
            name = ", ".join(str(record[key]) for key in ("job", "blocks", "order", "eviction"))
            note = f"{name}: {record['share_of_optimum']:.4f} of the optimum"
            print(f"{number} of {len(wanted)}: {note}", file=sys.stderr, flush=True)
    print("\n".join(tables(records)) + "\n")
    for bar in bars(records):
        print(f"- {bar}")
    if options.json is not None:
        write_records(options.json, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
