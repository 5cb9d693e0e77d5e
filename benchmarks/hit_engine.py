"""An engine on the virtual clock whose daemon lives: its jobs' leases never run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchrun.daemon.engine_link import RENEW_S
from batchrun.simulator.virtual.engine import RequestRecord, TrafficSource, VirtualEngine
from batchrun.simulator.virtual.laws import StepLaw
from batchrun.simulator.virtual.setup import NONCE, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.wire import Orders, encode

JOB_NAMES = ("job", *(f"job-{number}" for number in range(4)))
"""What a `JobFeeder` and a `PoolFeeder` call their jobs."""


def build_engine(
    blocks: int, settings: Mapping[str, object], law: StepLaw, sources: Sequence[TrafficSource]
) -> tuple[VirtualEngine, ColocatedScheduler]:
    """An engine under `echo` with these settings, and its scheduler.

    A feeder says nothing once its last row is sent; the daemon goes on renewing leases, here at
    the first end of a row after `RENEW_S`.
    """
    config = {"batchrun": {"policy": "echo", **settings}}
    shape = EngineShape(num_blocks=blocks, additional_config=config)
    engine = VirtualEngine(ColocatedScheduler, shape, law, sources)
    scheduler = engine.scheduler
    assert isinstance(scheduler, ColocatedScheduler)
    num_orders = 0

    def renew(record: RequestRecord) -> None:
        nonlocal num_orders
        if not record.is_online and engine.now_s >= num_orders * RENEW_S:
            num_orders = int(engine.now_s / RENEW_S) + 1
            orders = Orders(nonce=NONCE, epoch=1, number=num_orders, renew=JOB_NAMES)
            scheduler.daemon_link.control.receive(encode(orders))

    engine.end_listeners.append(renew)
    return engine, scheduler
