"""A call that is planned comes in: vLLM finds the room for it that the plan said there is."""

from __future__ import annotations

import scheduler_rig as rig
from vllm.config import VllmConfig

from batchrun.vllm_plugin.scheduler import ColocatedScheduler


def full_of_rows(num_rows: int, **more: object) -> ColocatedScheduler:
    """A scheduler whose rows have taken all the KV that they may."""
    scheduler = rig.ours(rig.build(**more))  # type: ignore[arg-type]
    for row in range(num_rows):
        request = rig.make_request(f"row-{row}", 200, row=row, max_tokens=100)
        request.prompt_token_ids[0] = row + 5
        scheduler.add_request(request)
    for _ in range(20):
        rig.step(scheduler)
    return scheduler


def steps_until(scheduler: ColocatedScheduler, name: str) -> int:
    """How many steps a request waits, 20 at most."""
    return next((n for n in range(20) if name in rig.step(scheduler)), 20)


def test_rows_make_room_for_the_watermark_too() -> None:
    def marked(config: VllmConfig) -> None:
        config.scheduler_config.watermark = 0.2

    scheduler = full_of_rows(10, change=marked)
    scheduler.add_request(rig.make_request("call", 300))

    assert steps_until(scheduler, "call") == 0
    rig.run(scheduler, 2_000)
