"""What the choice of an engine costs the gateway: CPU time of a call with its hashing, by router.

    python -m benchmarks.decision_cost [--router NAME ...] [--calls N] [--json FILE]

The gateway's own balancer, in the memory that its workers share, is asked about chat bodies whose
prompts begin with one of 200 documents, Zipf 1.1: it reads the body, ranks the engines, notes the
call, and is told of its first token and its end. No engine and no socket is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

import numpy as np

from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS
from batchrun.server.gateway.balancer import Balancer
from batchrun.server.gateway.shared_book import SharedBook, create
from batchrun.server.gateway.upstreams import Upstream
from benchmarks.records import Bar, Record, Spent, finish, parser, shown

NUM_DOCUMENTS = 200
WARM_UP_CALLS = 500
CASES = ((5_000, 8), (100_000, 8), (5_000, 64), (100_000, 64))
"""Bytes of a body, and engines."""
MOST_US = {(5_000, 8): 150.0, (100_000, 8): 600.0}
LEAST_PER_S = {(5_000, 64): 2_000.0}


def main() -> int:
    """Measure, print, save."""
    made = parser(__doc__, calls=3_000)
    made.add_argument("--router", choices=ROUTERS, nargs="+", default=[DEFAULT_ROUTER, "least"])
    options = made.parse_args()
    records = shown(
        measure(router, num_bytes, num_engines, options.calls)
        for router in options.router
        for num_bytes, num_engines in CASES
    )
    return finish(options.json, records, bars(records))


def measure(router: str, num_bytes: int, num_engines: int, num_calls: int) -> Record:
    """A flat record: microseconds of CPU a call, and calls a second of one core."""
    fd = create(1)
    balancer = Balancer(SharedBook(fd, 1, 0))
    engines = [Upstream(f"e{i}", f"http://127.0.0.1:{9000 + i}") for i in range(num_engines)]
    balancer.replace(engines, router)
    spent = Spent()
    for number, body in enumerate(bodies(num_bytes, WARM_UP_CALLS + num_calls)):
        if number == WARM_UP_CALLS:
            spent = Spent()
        decide(balancer, body, spent)
    os.close(fd)
    return {
        "router": router,
        "is_default": router == DEFAULT_ROUTER,
        "body_bytes": num_bytes,
        "num_engines": num_engines,
        "calls": num_calls,
        "cpu_us": 1e6 * spent.cpu_s / num_calls,
        "decisions_per_s": num_calls / spent.cpu_s,
    }


def decide(balancer: Balancer, body: bytes, spent: Spent) -> None:
    """One call from its body to its end."""
    with spent:
        routed = balancer.read(body)
        upstream = balancer.candidates(routed, now_s=routed.usage.now_s())[0]
        with balancer.sending(upstream, routed):
            routed.usage.on_begin(routed.usage.now_s())


def bodies(num_bytes: int, num: int) -> Iterator[bytes]:
    """Streamed chat calls of this size, nine tenths of which is a document."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, NUM_DOCUMENTS + 1) ** 1.1
    texts = [_text(rng, num_bytes * 9 // 10) for _ in range(NUM_DOCUMENTS)]
    for document in rng.choice(NUM_DOCUMENTS, num, p=weights / weights.sum()).tolist():
        question = _text(rng, num_bytes // 10)
        message = {"role": "user", "content": texts[document] + question}
        yield json.dumps({"model": "m", "stream": True, "messages": [message]}).encode()


def _text(rng: np.random.Generator, num_chars: int) -> str:
    return bytes(rng.integers(97, 123, num_chars, dtype=np.uint8)).decode()


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """Bounds of the shipped router."""
    for record in records:
        case = record["body_bytes"], record["num_engines"]
        if not record["is_default"]:
            continue
        name = f"{case[0] / 1000:g} kB, {case[1]} engines"
        if case in MOST_US:
            yield Bar(f"{name}: us of CPU", record["cpu_us"], MOST_US[case], is_most=True)
        if case in LEAST_PER_S:
            yield Bar(f"{name}: decisions/s", record["decisions_per_s"], LEAST_PER_S[case])


if __name__ == "__main__":
    raise SystemExit(main())
