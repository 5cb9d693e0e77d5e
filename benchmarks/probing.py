"""A calibration of the virtual engine: the probes of `batchrun calibrate` on the virtual clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batchrun.estimator.probes import PROBING_SETTINGS, Probe, ProbeCall, PromptMaker, make_round
from batchrun.estimator.profile import Recording, read_recording
from batchrun.hints import HINT_KEY
from batchrun.simulator.virtual.engine import DEFAULT_TIMING, Arrival, Timing, VirtualEngine
from batchrun.simulator.virtual.setup import EngineShape, StepLaw
from batchrun.vllm_plugin.scheduler import ColocatedScheduler


def record_probes(
    shape: EngineShape,
    law: StepLaw,
    path: Path,
    *,
    num_rounds: int,
    timing: Timing = DEFAULT_TIMING,
) -> Recording:
    """Send all probes to an engine of ours, which records its steps to `path`."""
    settings = {**PROBING_SETTINGS, "record_steps": str(path)}
    recorded = replace(shape, additional_config={HINT_KEY: settings})
    source = ProbeSource()
    engine = VirtualEngine(ColocatedScheduler, recorded, law, [source], timing)
    facts = read_recording(path.read_text()).facts
    prompts = PromptMaker(facts.vocabulary)
    for _ in range(num_rounds):
        prompts.next_round()
        for probe in make_round(facts):
            source.begin(probe, prompts)
            engine.run_until(math.inf)
    return read_recording(path.read_text())


class ProbeSource:
    """The callers of one probe: each sends its next call when the one before has ended."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._due: list[Sequence[ProbeCall]] = []
        self._rest_of: dict[str, deque[ProbeCall]] = {}
        self._prompts = PromptMaker(0)

    def begin(self, probe: Probe, prompts: PromptMaker) -> None:
        """Let the callers of `probe` begin."""
        self._prompts = prompts
        self._due = list(probe.callers)

    @property
    def next_due_s(self) -> float:
        """At once, for a caller that waits for nothing."""
        return 0.0 if self._due else math.inf

    def take_due(self, now_s: float) -> list[Arrival]:
        """The next call of each caller that waits for nothing."""
        arrivals = [self._send(deque(calls), now_s) for calls in self._due]
        self._due = []
        return arrivals

    def on_finished(self, request_id: str) -> None:
        """The caller goes on."""
        rest = self._rest_of.pop(request_id)
        if rest:
            self._due.append(rest)

    def _send(self, calls: deque[ProbeCall], now_s: float) -> Arrival:
        call = calls.popleft()
        request_id = f"probe-{self._num_sent}"
        self._num_sent += 1
        self._rest_of[request_id] = calls
        prompt = self._prompts.prompt(call)
        return Arrival(request_id, True, now_s, prompt, call.output_tokens)
