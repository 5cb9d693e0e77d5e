"""No chunk of a plan ends in an image of a model whose image tokens see each other; and two images
that do not fit beside each other stop nobody."""

from __future__ import annotations

from typing import Any

import pytest
import scheduler_rig as rig
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from batchrun.scheduling.policies import make_policy
from batchrun.scheduling.view import EngineView, Plan
from batchrun.vllm_plugin.control import Control, InForce
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.wire import Answer, Orders, encode, read_message

IMAGES = [(40, 100), (140, 70), (300, 90)]
"""Where each begins, and how long it is."""


class Sparing:
    """A policy that grants 32 tokens of every prompt."""

    def plan(self, view: EngineView) -> Plan:
        waiting = [*view.online_waiting, *view.offline_waiting]
        running = [*view.online_running, *view.offline_running]
        caps = {r.request_id: 32 for r in (*running, *waiting) if not r.is_decode}
        return Plan(admit=tuple(waiting), caps=caps)


def with_images(num_rows: int, **shape: Any) -> ColocatedScheduler:
    """A scheduler that keeps images whole and plans sparingly, with rows of three images."""

    def whole(config: VllmConfig) -> None:
        config.scheduler_config.disable_chunked_mm_input = True

    scheduler = rig.ours(rig.build(change=whole, num_blocks=400, **shape))
    scheduler.max_num_encoder_input_tokens = 1_000
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=10_000)
    scheduler.step_policy = Sparing()
    for row in range(num_rows):
        features = [
            MultiModalFeatureSpec(None, "image", f"{row}-{at}", PlaceholderRange(at, length), "")
            for at, length in IMAGES
        ]
        scheduler.add_request(rig.make_request(f"row-{row}", 500, row=row, features=features))
    return scheduler


def ends_of_chunks(scheduler: ColocatedScheduler) -> list[int]:
    """Where the chunks of all prompts end, until everybody has finished."""
    ends = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens, "it stands still"
        for name in output.num_scheduled_tokens:
            ends.append(scheduler.requests[name].num_computed_tokens)
        rig.answer(scheduler, output)
    return ends


@pytest.mark.parametrize("token_budget", [128, 256, 2_048])
def test_no_chunk_ends_in_an_image(token_budget: int) -> None:
    scheduler = with_images(5, token_budget=token_budget, max_num_seqs=8)
    ends = ends_of_chunks(scheduler)

    assert {40, 140, 210, 300, 390} <= set(ends)
    assert not [end for end in ends for at, length in IMAGES if at < end < at + length]


def test_an_image_longer_than_any_step_is_split_as_vllm_does() -> None:
    scheduler = with_images(2, token_budget=64, max_num_seqs=8)

    assert 500 in ends_of_chunks(scheduler)


def test_a_budget_that_would_cut_images_is_refused_and_says_why() -> None:
    control = Control(InForce("echo", 512), 32, "secret", cuts_no_image=True)
    orders = [Orders("secret", 1, budget, token_budget=budget) for budget in (511, 512)]
    less, same = [read_message(control.receive(encode(each)), Answer).error for each in orders]

    assert same is None
    assert less == "the token budget stays 512 here, not 511: each image must fit into a step whole"


@pytest.mark.parametrize(("first", "queue"), [(1, "arrival"), (None, "slack-euclid")])
def test_a_call_whose_image_finds_no_room_stops_nobody(first: int | None, queue: str) -> None:
    """What is left of its prompt would fill the whole step."""
    scheduler = rig.ours(rig.build(num_blocks=2_000, token_budget=512, max_num_seqs=16))
    policy = make_policy("echo", queue, scheduler.state.settings.queue_options)
    assert policy is not None
    scheduler.take_over(policy)
    scheduler._planned_as = "echo", queue
    scheduler.add_request(rig.make_request("decoding", 30, max_tokens=90))
    scheduler.max_num_encoder_input_tokens = 800
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=800)
    for name, row in (("first", first), ("second", None)):
        image = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(5, 800), "")
        request = rig.make_request(name, 900, row=row, features=[image], max_tokens=4)
        scheduler.add_request(request)
        rig.step(scheduler)
    scheduler.add_request(rig.make_request("text", 60))
    for _ in range(100):
        rig.step(scheduler)
    assert not scheduler.requests
