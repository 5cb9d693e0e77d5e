"""A stand-in worker that knows what every KV slot must hold.

A token's KV depends on all tokens before it, so a slot is taken to hold the hash of its prefix.
A step writes the hashes of the tokens it computes and then reads every slot of their context, as
each layer of a model does. A slot that was given away, never written, or written for another
prefix stops the run. The next token is a function of the hash: a lost or doubled token shows too.

The two workers keep of a request exactly what vLLM 0.32's runners keep (`GPUModelRunner`, "V1",
`_update_states`; `gpu/model_runner.py`, "V2", `finish_requests`, `add_requests`,
`update_requests`) and fail where those would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 5, 1996


def prefix_hash(parent: int, token: int) -> int:
    """What the KV of a token after a prefix is; 0 is the empty prefix. The same in every run."""
    return hash((parent, token))


def next_token(prefix: int) -> int:
    """The token that follows a prefix."""
    return FIRST_TOKEN_ID + prefix % NUM_TOKEN_IDS


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The output of a prompt."""
    prefix = 0
    for token in prompt:
        prefix = prefix_hash(prefix, token)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(prefix))
        prefix = prefix_hash(prefix, output[-1])
    return output


class _Held:
    """A request as a runner holds it: its tokens, their prefix hashes, its blocks."""

    __slots__ = ("block_ids", "computed", "hashes", "num_prompt", "tokens")

    def __init__(
        self, tokens: Sequence[int], num_prompt: int, block_ids: list[int], computed: int
    ) -> None:
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.num_prompt = num_prompt
        self.block_ids = block_ids
        self.computed = computed
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        prefix = self.hashes[-1] if self.hashes else 0
        for token in tokens:
            prefix = prefix_hash(prefix, token)
            self.tokens.append(token)
            self.hashes.append(prefix)

    def keep(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:], self.hashes[num_tokens:]


class _Kv:
    """The slots of every block."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: list[list[int | None]] = [[None] * block_tokens for _ in range(num_blocks)]

    def write(self, held: _Held, num_tokens: int) -> None:
        for position in range(held.computed, held.computed + num_tokens):
            block, slot = divmod(position, self._block_tokens)
            self._slots[held.block_ids[block]][slot] = held.hashes[position]

    def check(self, name: str, held: _Held, end: int) -> None:
        """Raises AssertionError unless the slots of the first `end` tokens hold their prefixes."""
        size = self._block_tokens
        for start in range(0, end, size):
            block_id = held.block_ids[start // size]
            wanted = held.hashes[start : min(start + size, end)]
            found = self._slots[block_id][: len(wanted)]
            assert block_id != 0, f"{name}: the null block stands at token {start}"
            assert found == wanted, f"{name}: block {block_id} does not hold token {start} on"


class ShadowWorker(ABC):
    """Runs steps in the order in which they were scheduled."""

    def __init__(self, num_blocks: int, block_tokens: int, max_num_seqs: int) -> None:
        self._kv = _Kv(num_blocks, block_tokens)
        self._max_num_seqs = max_num_seqs
        self._held: dict[str, _Held] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step. Raises AssertionError, KeyError or IndexError where KV is not right."""
        self._update(output)
        steps = [(name, self._held[name], n) for name, n in output.num_scheduled_tokens.items()]
        for name, held, num_tokens in steps:
            known = len(held.tokens)
            assert held.computed + num_tokens <= known, f"{name}: a token the worker never saw"
            self._kv.write(held, num_tokens)
        sampled = [self._sample(name, held, num_tokens) for name, held, num_tokens in steps]
        ids = [name for name, _, _ in steps]
        return ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)

    def _sample(self, name: str, held: _Held, num_tokens: int) -> list[int]:
        end = held.computed + num_tokens
        self._kv.check(name, held, end)
        if end < len(held.tokens):
            return []
        token = next_token(held.hashes[-1])
        held.extend([token])
        return [token]

    @abstractmethod
    def _update(self, output: SchedulerOutput) -> None:
        """Take over what the scheduler says has changed."""


class WorkerV1(ShadowWorker):
    """Runner V1: a batch of the last step's requests; who comes back is told its tokens again.

    With two steps in flight (`is_async`) a token in flight is known only to the next step, and only
    for a request that stands in both; vLLM gives this runner no third one.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, max_num_seqs: int, *, is_async: bool
    ) -> None:
        super().__init__(num_blocks, block_tokens, max_num_seqs)
        self._is_async = is_async
        self._batch: set[str] = set()

    def _update(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._held.pop(name, None)
            self._batch.discard(name)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        self._batch &= output.num_scheduled_tokens.keys() - resumed
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            prompt, blocks = new.prompt_token_ids, list(new.block_ids[0])
            self._held[new.req_id] = _Held(prompt, len(prompt), blocks, new.num_computed_tokens)
        for place in range(len(output.scheduled_cached_reqs.req_ids)):
            self._go_on(output, place)
        self._batch = set(output.num_scheduled_tokens)
        assert len(self._batch) <= self._max_num_seqs

    def _go_on(self, output: SchedulerOutput, place: int) -> None:
        cached = output.scheduled_cached_reqs
        name, blocks = cached.req_ids[place], cached.new_block_ids[place]
        num_output = cached.num_output_tokens[place]
        held = self._held[name]
        held.computed = cached.num_computed_tokens[place]
        held.keep(held.num_prompt + num_output)
        if name in cached.resumed_req_ids:
            assert blocks is not None
            held.block_ids = list(blocks[0])
        elif blocks is not None:
            held.block_ids += blocks[0]
        if name not in self._batch and self._is_async and num_output:
            held.keep(held.num_prompt)
            held.extend(cached.all_token_ids[name][-num_output:])


class WorkerV2(ShadowWorker):
    """Runner V2: a slot per request from admission until it ends or is preempted."""

    def _update(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._held.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None and new.prefill_token_ids is not None
            assert len(self._held) < self._max_num_seqs, "no free slot"
            blocks, computed = list(new.block_ids[0]), new.num_computed_tokens
            num_prompt = len(new.prompt_token_ids)
            self._held[new.req_id] = _Held(new.prefill_token_ids, num_prompt, blocks, computed)
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            held, blocks_more = self._held[name], cached.new_block_ids[place]
            held.computed = cached.num_computed_tokens[place]
            if blocks_more is not None:
                held.block_ids += blocks_more[0]
