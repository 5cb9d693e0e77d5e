"""What runs: a model's shape with random weights, the engine around it, and the load it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchrun.config import SloConfig
from benchmarks.data import DOCUMENTS
from benchmarks.scenarios import Job, JobTable, Order, read_table, scaled


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, its engine and the scale of the load.

    `config` is the model's config.json; `engine` are vLLM's engine arguments beside those that
    every shape has. `token_scale` multiplies all lengths of the recorded load, `time_scale` all
    gaps between its arrivals. The job holds LooGLE's documents `job_copies` times, each copy with
    fresh text, so that it does not end within a phase. `budget` is the engine's token budget,
    `grouped_budgets` those tried for hand-grouped rows.
    """

    name: str
    config: dict[str, Any]
    engine: dict[str, Any]
    num_blocks: int
    block_tokens: int
    budget: int
    grouped_budgets: tuple[int, ...]
    job_copies: int
    token_scale: float = 1.0
    time_scale: float = 1.0
    slo: SloConfig = field(default_factory=SloConfig)

    def job(self, order: Order, seed: int) -> Job:
        """Questions about documents of LooGLE's lengths."""
        scale = self.token_scale
        documents = [
            (scaled(tokens, scale), [(question, scaled(answer, scale)) for question, answer in qas])
            for tokens, qas in read_table(DOCUMENTS)["loogle"]
        ]
        return JobTable(documents * self.job_copies).draw(seed, order)


def _llama(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }


LLAMA_8B = Shape(
    name="llama-3.1-8b",
    config=_llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    ),
    engine={"dtype": "bfloat16", "max_model_len": 36_864, "gpu_memory_utilization": 0.6},
    num_blocks=8_600,
    block_tokens=16,
    budget=8_192,
    grouped_budgets=(512, 2_048, 8_192),
    job_copies=10,
)
TINY = Shape(
    name="tiny",
    config=_llama(
        vocab_size=2_048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8_192,
        dtype="float32",
    ),
    engine={
        "dtype": "float32",
        "max_model_len": 4_096,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 64 << 20,
    },
    num_blocks=160,
    block_tokens=32,
    budget=512,
    grouped_budgets=(128, 512),
    job_copies=4,
    token_scale=0.04,
    time_scale=0.2,
    slo=SloConfig(ttft_s=0.5),
)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, TINY)}
