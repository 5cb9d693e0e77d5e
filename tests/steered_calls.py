"""Calls that ask for a tier or a class."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

from deployment_rig import WAIT_S, DeploymentRig
from openai import OpenAI


def ask_flex(client: OpenAI, *, is_streamed: bool) -> tuple[set[str | None], str]:
    """A call that may run as offline work: the tiers that the reply names, and its text."""
    create: Callable[..., Any] = partial(
        client.chat.completions.create,
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        temperature=0,
        service_tier="flex",
    )
    if is_streamed:
        chunks = list(create(stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return {chunk.service_tier for chunk in chunks}, text
    whole = create()
    return {whole.service_tier}, whole.choices[0].message.content or ""


def post(rig: DeploymentRig, route: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of a call of the class `fast`."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{rig.port}/v1/{route}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-Batchrun-Class": "fast"},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
