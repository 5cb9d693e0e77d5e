"""One real vLLM engine on the CPU through a trial of mixed requests: python engine_trial.py TRIAL.

TRIAL is a JSON file with a `Trial`; what happened is written beside it as TRIAL.result.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NONCE = "trial"
MAX_STEPS = 20_000
WAVE_STEPS = 150
"""A wave of online requests comes at the latest so many steps after the one before."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `abort_after_tokens`: its client leaves once it has so many (None: it stays).

    `wave` 0 is there from the start; the others come one after the other, as KV gets scarce.
    """

    name: str
    prompt: list[int]
    max_tokens: int
    hint: dict[str, Any] | None = None
    wave: int = 0
    abort_after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """An engine and what it is asked. No `policy`: vLLM's own scheduler.

    The clients of the first `num_leaving_preempted` requests that are preempted leave at once;
    calls with an `abort_after_tokens` of their own do not count.
    """

    model: str
    calls: list[Call]
    num_blocks: int
    policy: str | None = None
    is_async: bool = False
    num_leaving_preempted: int = 0


@dataclass(slots=True)
class Answer:
    """What a request got. `top_logprobs` are those of the five likeliest tokens, by rank."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    num_hit_tokens: int = 0
    reason: str | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class Result:
    """What happened, and what the engine held at the end."""

    answers: dict[str, Answer]
    num_steps: int
    is_async: bool
    num_requests_left: int
    num_free_blocks: int
    num_blocks_in_use: int
    is_cache_reset: bool


def run(trial: Trial) -> Result:
    """Send everything, step until nobody waits, look at what is left."""
    from vllm.v1.engine.llm_engine import LLMEngine

    _force_async(is_async=trial.is_async)
    engine = LLMEngine.from_engine_args(_engine_args(trial))
    core: Any = engine.engine_core
    driver = _Driver(engine, trial)
    for _ in driver.steps():
        assert driver.num_steps < MAX_STEPS, f"stuck with {list(driver.scheduler.requests)}"
    scheduler = driver.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    result = Result(
        answers=driver.answers,
        num_steps=driver.num_steps,
        is_async=core.engine_core.batch_queue is not None,
        num_requests_left=len(scheduler.requests) + len(scheduler.running) + len(scheduler.waiting),
        num_free_blocks=pool.get_num_free_blocks(),
        num_blocks_in_use=sum(b.ref_cnt != 0 for b in pool.blocks if not b.is_null),
        is_cache_reset=scheduler.reset_prefix_cache(),
    )
    core.shutdown()
    return result


class _Driver:
    def __init__(self, engine: Any, trial: Trial) -> None:
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.answers = {call.name: Answer() for call in trial.calls}
        self.num_steps = 0
        self._calls = {call.name: call for call in trial.calls}
        last = max(call.wave for call in trial.calls)
        self._waves = deque([c for c in trial.calls if c.wave == i] for i in range(last + 1))
        self._num_leaving = trial.num_leaving_preempted
        self._wave_at_step = -WAVE_STEPS
        self._engine_names: dict[str, str] = {}

    def steps(self) -> Iterator[None]:
        """Step the engine until all is answered and nothing is in flight."""
        while self._waves or self.engine.has_unfinished_requests() or self._is_in_flight():
            if self._waves and self._is_time_for_a_wave():
                self._wave_at_step = self.num_steps
                for call in self._waves.popleft():
                    self._send(call)
            self._step()
            self._look_for_preempted()
            yield

    def _is_in_flight(self) -> bool:
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def _is_time_for_a_wave(self) -> bool:
        pool = self.scheduler.kv_cache_manager.block_pool
        since = self.num_steps - self._wave_at_step
        is_scarce = pool.get_num_free_blocks() < pool.num_gpu_blocks // 8
        return since >= WAVE_STEPS or (since >= WAVE_STEPS // 3 and is_scarce)

    def _send(self, call: Call) -> None:
        from vllm import SamplingParams

        extra = None if call.hint is None else {"batchrun": json.dumps(call.hint)}
        sampling = SamplingParams(
            max_tokens=call.max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=5,
            extra_args=extra,
        )
        priority = 0 if call.hint is None else 10
        prompt = {"prompt_token_ids": call.prompt}
        engine_name = self.engine.add_request(call.name, prompt, sampling, priority=priority)
        self._engine_names[engine_name] = call.name
        if call.abort_after_tokens == 0:
            self._step()
            self._abort(call)

    def _step(self) -> None:
        for output in self.engine.step():
            self._take(output)
        self.num_steps += 1

    def _take(self, output: Any) -> None:
        answer, call = self.answers[output.request_id], self._calls[output.request_id]
        completion = output.outputs[0]
        new = range(len(answer.tokens), len(completion.token_ids))
        for i in new:
            token = completion.token_ids[i]
            known = completion.logprobs[i]
            answer.tokens.append(token)
            answer.logprobs.append(known[token].logprob)
            by_rank = sorted((each.logprob for each in known.values()), reverse=True)
            answer.top_logprobs.append(by_rank[:5])
        answer.num_hit_tokens = output.num_cached_tokens or 0
        answer.reason = completion.finish_reason
        wanted = call.abort_after_tokens
        if wanted is not None and answer.reason is None and len(answer.tokens) >= wanted:
            self._abort(call)

    def _abort(self, call: Call) -> None:
        self.engine.abort_request([call.name])
        self.answers[call.name].reason = "abort"

    def _look_for_preempted(self) -> None:
        for request in list(self.scheduler.requests.values()):
            call = self._calls[self._engine_names[request.request_id]]
            self.answers[call.name].num_preemptions = request.num_preemptions
            is_preempted = request.num_preemptions > 0 and request in self.scheduler.waiting
            if is_preempted and call.abort_after_tokens is None and self._num_leaving:
                self._num_leaving -= 1
                self._abort(call)


def _engine_args(trial: Trial) -> Any:
    from vllm import EngineArgs

    ours: dict[str, Any] = {}
    if trial.policy is not None:
        ours["scheduler_cls"] = "batchrun.vllm_plugin.ColocatedScheduler"
        ours["additional_config"] = {"batchrun": {"policy": trial.policy, "reserve": 0.0}}
    return EngineArgs(
        model=trial.model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        block_size=32,
        num_gpu_blocks_override=trial.num_blocks,
        scheduling_policy="priority",
        **ours,
    )


def _force_async(*, is_async: bool) -> None:
    """The CPU platform turns asynchronous scheduling off; turn it on again after it (or not)."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def checked(cls: type[CpuPlatform], config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = is_async

    CpuPlatform.check_and_update_config = classmethod(checked)  # type: ignore[assignment]


def main() -> None:
    path = Path(sys.argv[1])
    fields = json.loads(path.read_text())
    fields["calls"] = [Call(**call) for call in fields["calls"]]
    result = run(Trial(**fields))
    path.with_suffix(".result").write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    os.environ.update({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "BATCHRUN_HINT_NONCE": NONCE,
    })
    main()
