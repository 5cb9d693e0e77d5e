"""A random-weight LLaVA-NeXT, built locally: the tiny model's language side, and eyes.

How many tokens an image takes depends on its size, as in large models. It sees nothing, but what
it says depends on what it is shown. The same bytes come out every time, without torch and without
a network.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save

from batchrun.engine.tiny_model import (
    CHAT_TEMPLATE,
    FILES,
    HIDDEN,
    SEED,
    SPECIAL_TOKENS,
    Weights,
    build_folder,
    json_bytes,
    language_weights,
    model_config,
    normal,
    tokenizer_files,
    train_tokenizer,
)

IMAGE_TOKEN = "<image>"
SEEN_TOKENS = [*SPECIAL_TOKENS, IMAGE_TOKEN]
VISION_HIDDEN = 64
VISION_FEED_FORWARD = 128
NUM_VISION_LAYERS = 1
NUM_VISION_HEADS = 2
TILE_PIXELS, PATCH_PIXELS = 32, 8
GRIDS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
"""(height, width) in pixels of the grids of tiles, one of which an image is scaled to."""
VISION_FILES = (*FILES, "preprocessor_config.json", "processor_config.json")

_PARTS = """
{%- macro show(content) -%}
{%- if content is string -%}
{{ content }}
{%- else -%}
{%- for part in content or [] -%}
{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
VISION_TEMPLATE = (
    _PARTS
    + CHAT_TEMPLATE.replace("{{ messages[0].content }}", "{{ show(messages[0].content) }}").replace(
        "{{ message.content or '' }}", "{{ show(message.content) }}"
    )
).lstrip()


def build_tiny_vision_model(path: Path) -> None:
    """Write the tiny vision-language model to the folder `path`; see `build_tiny_model`."""
    build_folder(path, VISION_FILES, vision_config(), _contents)


def vision_config() -> dict[str, object]:
    """The configuration of the whole model."""
    return {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "text_config": model_config(),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_FEED_FORWARD,
            "projection_dim": VISION_HIDDEN,
            "num_hidden_layers": NUM_VISION_LAYERS,
            "num_attention_heads": NUM_VISION_HEADS,
            "image_size": TILE_PIXELS,
            "patch_size": PATCH_PIXELS,
        },
        "image_token_index": SEEN_TOKENS.index(IMAGE_TOKEN),
        "image_grid_pinpoints": GRIDS,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _contents() -> dict[str, bytes]:
    tokenizer = train_tokenizer(SEEN_TOKENS)
    language = language_weights(tokenizer, len(SEEN_TOKENS))
    weights = {f"language_model.{name}": values for name, values in language.items()}
    weights |= _vision_weights()
    return {
        "config.json": json_bytes(vision_config()),
        "model.safetensors": save(weights, {"format": "pt"}),
        "preprocessor_config.json": json_bytes({
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": TILE_PIXELS},
            "crop_size": {"height": TILE_PIXELS, "width": TILE_PIXELS},
            "image_grid_pinpoints": GRIDS,
        }),
        "processor_config.json": json_bytes({
            "processor_class": "LlavaNextProcessor",
            "image_token": IMAGE_TOKEN,
            "patch_size": PATCH_PIXELS,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        }),
        **tokenizer_files(tokenizer, SEEN_TOKENS, VISION_TEMPLATE),
    }


def _vision_weights() -> Weights:
    rng = np.random.RandomState(SEED + 1)
    tower = "vision_tower.vision_model"
    num_places = (TILE_PIXELS // PATCH_PIXELS) ** 2 + 1
    patch = (VISION_HIDDEN, 3, PATCH_PIXELS, PATCH_PIXELS)
    weights = {
        f"{tower}.embeddings.class_embedding": normal(rng, VISION_HIDDEN, scale=1.0),
        f"{tower}.embeddings.patch_embedding.weight": normal(rng, *patch, scale=0.1),
        f"{tower}.embeddings.position_embedding.weight": normal(
            rng, num_places, VISION_HIDDEN, scale=1.0
        ),
        "image_newline": normal(rng, HIDDEN, scale=1.0),
        **_linear(rng, "multi_modal_projector.linear_1", HIDDEN, VISION_HIDDEN),
        **_linear(rng, "multi_modal_projector.linear_2", HIDDEN, HIDDEN),
        **_norm(f"{tower}.pre_layrnorm"),
        **_norm(f"{tower}.post_layernorm"),
    }
    for layer in range(NUM_VISION_LAYERS):
        prefix = f"{tower}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights |= _linear(rng, f"{prefix}.self_attn.{name}", VISION_HIDDEN, VISION_HIDDEN)
        weights |= _linear(rng, f"{prefix}.mlp.fc1", VISION_FEED_FORWARD, VISION_HIDDEN)
        weights |= _linear(rng, f"{prefix}.mlp.fc2", VISION_HIDDEN, VISION_FEED_FORWARD)
        weights |= _norm(f"{prefix}.layer_norm1") | _norm(f"{prefix}.layer_norm2")
    return weights


def _linear(rng: np.random.RandomState, name: str, rows: int, columns: int) -> Weights:
    weight = normal(rng, rows, columns, scale=columns**-0.5)
    return {f"{name}.weight": weight, f"{name}.bias": np.zeros(rows, np.float32)}


def _norm(name: str) -> Weights:
    ones, zeros = np.ones(VISION_HIDDEN, np.float32), np.zeros(VISION_HIDDEN, np.float32)
    return {f"{name}.weight": ones, f"{name}.bias": zeros}
