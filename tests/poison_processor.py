"""A logits processor of vLLM that ends the engine, as a bug in a kernel would, when a row with
`vllm_xargs: {poison: 1}` has got some tokens."""

from __future__ import annotations

import os
import signal

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

NUM_TOKENS = 6


class Poison(LogitsProcessor):
    """Follows the tokens of poisoned rows by their place in the batch."""

    def __init__(self, *_: object) -> None:
        self._outputs: dict[int, list[int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Everything goes."""

    def is_argmax_invariant(self) -> bool:
        """It changes no logits."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Rows come, go and move."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._outputs.pop(index, None)
        for index, params, _, output in batch_update.added:
            is_poison = (params.extra_args or {}).get("poison")
            self._put(index, output if is_poison else None)
        for source, target, way in batch_update.moved:
            moved, other = self._outputs.pop(source, None), self._outputs.pop(target, None)
            self._put(target, moved)
            if way is MoveDirectionality.SWAP:
                self._put(source, other)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits as they are, or the end."""
        if any(len(output) >= NUM_TOKENS for output in self._outputs.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return logits

    def _put(self, index: int, output: list[int] | None) -> None:
        self._outputs.pop(index, None)
        if output is not None:
            self._outputs[index] = output
