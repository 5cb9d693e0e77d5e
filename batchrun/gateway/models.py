"""`GET /v1/models/{model}`, answered from the list: vLLM has no such route."""

from __future__ import annotations

import json
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from batchrun.errors import EngineError
from batchrun.gateway.envelope import error_response
from batchrun.gateway.headers import REQUEST_ID

LIST_TARGET = "/v1/models"
MAX_LIST_BYTES = 4 * 2**20


def model_id_in(raw_path: str) -> str | None:
    """The model that a raw (percent-encoded) path names; slashes may be encoded or not."""
    model_id = unquote(raw_path.removeprefix(LIST_TARGET + "/"))
    return model_id if raw_path.startswith(LIST_TARGET + "/") and model_id else None


async def model_response(
    reply: aiohttp.ClientResponse, *, model_id: str, request_id: str
) -> web.Response:
    """The one model out of an engine's list, or a 404 envelope. Raises EngineError."""
    try:
        text = await reply.content.read(MAX_LIST_BYTES)
        while not reply.content.at_eof() and len(text) < MAX_LIST_BYTES:
            text += await reply.content.read(MAX_LIST_BYTES - len(text))
        models = json.loads(text)["data"]
        found = [model for model in models if model["id"] == model_id]
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError("the engine did not list its models") from error
    if not found:
        message = f"The model '{model_id}' does not exist"
        return error_response(404, message, request_id=request_id, code="model_not_found")
    return web.json_response(found[0], headers={REQUEST_ID: request_id})
