"""A random-weight Idefics3, built locally: the tiny model's language side, and eyes.

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
    END_OF_TEXT_ID,
    FILES,
    HIDDEN,
    SEED,
    SPECIAL_TOKENS,
    TURN_END_ID,
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
MOST_TILES = 6
"""Along a side, of those that the processor has tokens for."""
SEEN_TOKENS = [
    *SPECIAL_TOKENS,
    IMAGE_TOKEN,
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row + 1}_col_{column + 1}>" for row, column in np.ndindex(MOST_TILES, MOST_TILES)),
]
VISION_HIDDEN = 64
VISION_FEED_FORWARD = 128
NUM_VISION_LAYERS = 1
NUM_VISION_HEADS = 2
IMAGE_PIXELS, TILE_PIXELS, PATCH_PIXELS = 64, 32, 4
"""An image is scaled to so many pixels along its longer side, and cut into tiles, and these into
patches; the tiles and the whole image are what the model sees."""
MERGED_PATCHES = 2
"""So many patches along each side make a token."""
VISION_FILES = (*FILES, "preprocessor_config.json", "processor_config.json")

_PARTS = """
{%- macro show(content) -%}
{%- if content is string -%}
{{ content }}
{%- elif content -%}
{%- for part in content -%}
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
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": model_config(),
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_FEED_FORWARD,
            "num_hidden_layers": NUM_VISION_LAYERS,
            "num_attention_heads": NUM_VISION_HEADS,
            "image_size": TILE_PIXELS,
            "patch_size": PATCH_PIXELS,
        },
        "scale_factor": MERGED_PATCHES,
        "image_token_id": SEEN_TOKENS.index(IMAGE_TOKEN),
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _contents() -> dict[str, bytes]:
    tokenizer = train_tokenizer(SEEN_TOKENS)
    language = language_weights(tokenizer, len(SEEN_TOKENS))
    weights = {name.replace("model.", "model.text_model."): w for name, w in language.items()}
    weights |= _vision_weights()
    return {
        "config.json": json_bytes(vision_config()),
        "model.safetensors": save(weights, {"format": "pt"}),
        "preprocessor_config.json": json_bytes({
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": IMAGE_PIXELS},
            "max_image_size": {"longest_edge": TILE_PIXELS},
        }),
        "processor_config.json": json_bytes({
            "processor_class": "Idefics3Processor",
            "image_seq_len": (TILE_PIXELS // PATCH_PIXELS // MERGED_PATCHES) ** 2,
        }),
        **tokenizer_files(tokenizer, SEEN_TOKENS, VISION_TEMPLATE),
    }


def _vision_weights() -> Weights:
    rng = np.random.RandomState(SEED + 1)
    tower, places = "model.vision_model", (TILE_PIXELS // PATCH_PIXELS) ** 2
    patch = (VISION_HIDDEN, 3, PATCH_PIXELS, PATCH_PIXELS)
    merged = VISION_HIDDEN * MERGED_PATCHES**2
    projection = normal(rng, HIDDEN, merged, scale=merged**-0.5)
    weights = {
        f"{tower}.embeddings.patch_embedding.weight": normal(rng, *patch, scale=0.1),
        f"{tower}.embeddings.patch_embedding.bias": np.zeros(VISION_HIDDEN, np.float32),
        f"{tower}.embeddings.position_embedding.weight": normal(
            rng, places, VISION_HIDDEN, scale=1.0
        ),
        "model.connector.modality_projection.proj.weight": projection,
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
