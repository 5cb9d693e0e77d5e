"""One row in trouble stops neither its job nor an engine: the other rows end, and so does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from batch_client import chat_lines, deployment_client
from batch_rig import counts
from deployment_rig import DeploymentRig
from engine_builders import make_request

from batchrun.engine.client import EngineClient
from batchrun.types import OutcomeKind


@pytest.mark.parametrize("status", [302, 403, 404])
def test_a_single_row_s_refusal_is_its_own_error(rig: DeploymentRig, status: int) -> None:
    rule = {"match": {"substring": "question 3"}, "action": {"status": status}}
    rig.use_fake_engine(rules=[rule])
    job = rig.submit_rows(*(f"question {i}" for i in range(6)))
    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 5, 1)


def test_rows_that_are_refused_at_once_do_not_speak_for_those_that_take_longer(
    rig: DeploymentRig,
) -> None:
    rule = {"match": {"substring": "missing"}, "action": {"status": 404}}
    rig.use_fake_engine("--latency-s=2", rules=[rule])
    job = rig.submit_rows(*(f"missing {i}" if i < 3 else f"row {i}" for i in range(40)))
    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"], view["num_failed"]) == ("completed", 37, 3)


def test_a_batch_whose_requests_are_all_refused_rests_until_they_are_taken(
    rig: DeploymentRig,
) -> None:
    rule = {"match": {"substring": "question"}, "action": {"status": 404}, "times": 49}
    rig.use_fake_engine(rules=[rule])
    with deployment_client(rig) as client:
        batch = client.wait_until_ended(client.create(chat_lines(12)).id)

    assert (batch.status, counts(batch)) == ("completed", (12, 12, 0))


def test_a_hung_row_and_refusals_leave_the_engine_to_others(rig: DeploymentRig) -> None:
    hang = {"match": {"substring": "hangs"}, "action": {"hang": True}}
    busy = {"match": {"substring": "busy"}, "action": {"status": 503, "retry_after": "0"}}
    rig.use_fake_engine(rules=[hang, busy | {"times": 3}])
    rig.submit_rows("hangs")
    rig.wait_for_executions(1)
    job = rig.submit_rows("busy 1", "busy 2", "busy 3", *(f"well {i}" for i in range(17)))
    view = rig.wait_until_ended(job)

    assert (view["state"], view["num_completed"]) == ("completed", 20)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_row_that_never_ends_leaves_the_engine_to_others_after_a_death(
    rig: DeploymentRig,
) -> None:
    rig.use_fake_engine(rules=[{"match": {"substring": "hangs"}, "action": {"hang": True}}])
    hung = rig.submit_rows("hangs")
    rig.wait_for_executions(1)
    rig.kill("engine")
    rig.wait_for_executions(2)
    job = rig.submit_rows(*(f"well {i}" for i in range(20)))
    view = rig.wait_until_ended(job, wait_s=120)

    assert (view["state"], view["num_completed"]) == ("completed", 20)
    assert rig.job(hung)["state"] == "running"


async def stop_short(response: web.StreamResponse) -> None:
    """As long as was told it never gets."""
    response.headers["Content-Length"] = "99"


async def never_end(response: web.StreamResponse) -> None:
    """No chunk says that it was the last one."""
    response.enable_chunked_encoding()


@pytest.mark.parametrize("kind", [stop_short, never_end])
@pytest.mark.parametrize(
    ("drips", "row_s", "words"),
    [(False, 60.0, "the reply broke off after 11 bytes"), (True, 0.5, "no answer within 0.5 s")],
)
async def test_a_reply_that_stops_coming_is_broken_off(
    kind: Callable[[web.StreamResponse], Awaitable[None]], *, drips: bool, row_s: float, words: str
) -> None:
    """Also one that goes on, a blank at a time."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await kind(response)
        await response.prepare(request)
        await response.write(b'{"choices":')
        while drips:
            await response.write(b" ")
            await asyncio.sleep(0.05)
        await asyncio.Event().wait()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    idle_s = 20.0 if drips else 0.2
    client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", reply_idle_s=idle_s)
    try:
        async with asyncio.timeout(20):
            outcome = await client.execute(make_request(), timeout_s=row_s)
        assert outcome.kind is OutcomeKind.RETRY and outcome.error is not None
        assert words in outcome.error.message
    finally:
        await client.close()
        await runner.cleanup()
