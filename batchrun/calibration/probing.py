"""The probes of a calibration, sent to a running engine over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

from batchrun.engine import EngineClient
from batchrun.errors import EngineError
from batchrun.estimator import Probe, ProbeCall, PromptMaker, Recording, make_round, read_recording
from batchrun.types import OutcomeKind, ProgressSink, Request

NUM_ROUNDS = 6
"""The first is not counted: an engine that has just started allocates memory as it goes."""
LONGEST_S = 120.0
"""With the online calls after it, everything is done in under three minutes."""


class Prober:
    """Sends probes to one engine that records its steps to `steps_path`."""

    def __init__(self, client: EngineClient, model: str, steps_path: Path) -> None:
        self._client = client
        self._model = model
        self._steps_path = steps_path
        self._epoch = int(time.time())
        self._num_sent = 0

    async def run(self, progress: ProgressSink) -> Recording:
        """All rounds, or those that LONGEST_S allows; what was recorded after the first.

        Raises EngineError when the engine is too small, answers with an error or records nothing.
        """
        facts = self._read().facts
        probes = make_round(facts)
        prompts = PromptMaker(facts.vocabulary)
        warm_up: Recording | None = None
        try:
            async with asyncio.timeout(LONGEST_S):
                for turn in range(NUM_ROUNDS):
                    prompts.next_round()
                    for i, probe in enumerate(probes):
                        done, total = turn * len(probes) + i, NUM_ROUNDS * len(probes)
                        progress(f"measuring {probe.stage}", done, total)
                        await self._send(probe, prompts)
                    warm_up = warm_up or self._read()
        except TimeoutError:
            pass
        recording = self._read()
        return recording if warm_up is None else recording.after(warm_up)

    async def _send(self, probe: Probe, prompts: PromptMaker) -> None:
        await asyncio.gather(*[self._call(calls, prompts) for calls in probe.callers])

    async def _call(self, calls: Iterable[ProbeCall], prompts: PromptMaker) -> None:
        for call in calls:
            outcome = await self._client.execute(self._request(call, prompts.prompt(call)))
            if outcome.kind is not OutcomeKind.OK:
                reason = outcome.error.message if outcome.error else outcome.kind
                raise EngineError(f"the engine did not answer a call of the calibration: {reason}")

    def _request(self, call: ProbeCall, prompt: list[int]) -> Request:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": call.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._num_sent += 1
        return Request("calibrate", self._num_sent, 1, self._epoch, "/v1/completions", body)

    def _read(self) -> Recording:
        try:
            return read_recording(self._steps_path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EngineError(
                "the engine recorded no steps; are there --scheduler-cls or --additional-config "
                "among its `vllm_args`?"
            ) from error
