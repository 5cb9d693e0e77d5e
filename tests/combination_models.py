"""Models for tests of what batchrun's scheduler can be combined with: adapters, a hybrid model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from batchrun.engine.tiny_model import FEED_FORWARD, HIDDEN, NUM_LAYERS

LORA_RANK = 8
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

HYBRID_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
"""Half of its layers see 64 tokens: two KV groups. Weights come from `--load-format=dummy`."""


def build_lora(folder: Path, seed: int) -> Path:
    """A random adapter for the tiny model, strong enough to change what it says."""
    folder.mkdir(parents=True)
    scale = np.float32(0.1)
    rng = np.random.RandomState(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        inner, outer = (LORA_RANK, FEED_FORWARD), (HIDDEN, LORA_RANK)
        weights[f"{name}.lora_A.weight"] = rng.standard_normal(inner).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = rng.standard_normal(outer).astype(np.float32) * scale
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": ["down_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def build_hybrid(folder: Path, tiny_model: Path) -> Path:
    """A model with two kinds of attention, and the tiny model's tokenizer."""
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_model / name, folder / name)
    (folder / "config.json").write_text(json.dumps(HYBRID_CONFIG))
    return folder
