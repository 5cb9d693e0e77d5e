"""A route for streaming sessions: vLLM has them for audio alone, under every other model inside.

An ASGI middleware (`--middleware=session_route.SessionRoute`) before vLLM's own routes, in an
engine of a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.protocol import EngineClient, StreamingInput
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams

PATH = "/session"


class SessionRoute:
    """`POST /session` with `turns`, lists of token ids, and `max_tokens` of each answer; the reply
    is the answers, lists of token ids. A turn comes when the answer to the one before is there."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand the call on."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).json()
        answers = await converse(scope["app"].state.engine_client, **body)
        await JSONResponse(answers)(scope, receive, send)


async def converse(
    engine: EngineClient, turns: list[list[int]], max_tokens: int, vllm_xargs: dict[str, Any]
) -> list[list[int]]:
    """One session, greedy."""
    answers: list[list[int]] = []
    is_answered = asyncio.Event()

    async def inputs() -> AsyncGenerator[StreamingInput]:
        for turn in turns:
            is_answered.clear()
            answers.append([])
            yield StreamingInput(TokensPrompt(prompt_token_ids=turn))  # type: ignore[arg-type]
            await is_answered.wait()

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=vllm_xargs,
    )
    async for output in engine.generate(inputs(), params, uuid4().hex):
        answers[-1] += output.outputs[0].token_ids
        if len(answers[-1]) >= max_tokens:
            is_answered.set()
    return answers
