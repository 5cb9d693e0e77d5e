"""What an engine says of itself: what its step times hold for, and its limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What a profile holds for: any other value makes the fitted times wrong."""

    model: str
    vllm_version: str
    device: str
    dtype: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's identity and its limits: of the KV cache, of one request, of one step."""

    engine: EngineIdentity
    kv_blocks: int
    longest_tokens: int
    """Prompt and output of one request."""
    token_budget: int
    """New tokens in one step."""
    max_running: int
    """Requests in one step."""
    vocabulary: int
    """Token ids run from 0 to this number, exclusive."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv_blocks * self.engine.block_tokens
