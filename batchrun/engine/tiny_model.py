"""A random-weight Llama and its tokenizer, built locally: small enough for any machine.

It is real in every code path and says nothing sensible: its text is noise. The same bytes come
out every time, without torch and without a network.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from batchrun.errors import InputError
from batchrun.samples.prose import tokenizer_corpus

SEED = 20
VOCABULARY = 2048
HIDDEN = 256
NUM_LAYERS = 4
NUM_HEADS = 1
NUM_KV_HEADS = 1
HEAD_SIZE = 32
FEED_FORWARD = 704
MAX_TOKENS = 65_536
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
END_OF_TEXT_ID, TURN_END_ID = 0, 2

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

Weights = dict[str, NDArray[np.float32]]

CHAT_TEMPLATE = """\
{%- if tools or (messages and messages[0].role == 'system') -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}

# Tools
{% for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif -%}
<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tiny_model(path: Path) -> None:
    """Write the tiny model to the folder `path`, in the layout that Hugging Face uses.

    Takes a few seconds. A folder that holds the model already is left alone; one that holds
    anything else is refused. The folder appears whole or not at all. Raises InputError.
    """
    if _is_built(path):
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"{path}: is there already and is not batchrun's tiny model; name another folder"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(
            prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True
        ) as unfinished:
            _write_files(Path(unfinished))
            _move(Path(unfinished), path)
    except OSError as error:
        is_no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        why = f"{path.parent} is not a folder" if is_no_folder else error.strerror
        raise InputError(f"{path}: cannot be written: {why}") from error


def _is_built(path: Path) -> bool:
    if not all((path / name).is_file() for name in FILES):
        return False
    return (path / "config.json").read_bytes() == _json_bytes(_model_config())


def _move(source: Path, target: Path) -> None:
    """Rename; another process that was quicker has built the same bytes."""
    source.chmod(0o755)
    try:
        source.replace(target)
    except OSError:
        if not _is_built(target):
            raise


def _write_files(folder: Path) -> None:
    generation = {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    tokenizer = _train_tokenizer()
    contents = {
        "config.json": _json_bytes(_model_config()),
        "generation_config.json": _json_bytes(generation),
        "model.safetensors": save(_weights(tokenizer), {"format": "pt"}),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json_bytes(_tokenizer_config()),
    }
    for name in FILES:
        (folder / name).write_bytes(contents[name])


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _model_config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": MAX_TOKENS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "dtype": "float32",
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that a number costs the same wherever it occurs.
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_corpus(), trainer)
    return tokenizer


def _weights(tokenizer: Tokenizer) -> Weights:
    # RandomState, not default_rng: numpy promises that its stream never changes.
    rng = np.random.RandomState(SEED)
    weights = {"model.embed_tokens.weight": _normal(rng, VOCABULARY, HIDDEN, scale=1.0)}
    for layer in range(NUM_LAYERS):
        weights |= _layer_weights(rng, f"model.layers.{layer}")
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    head = _normal(rng, VOCABULARY, HIDDEN, scale=3.0 / HIDDEN**0.5)
    head[_unsayable(tokenizer)] = 0.0
    weights["lm_head.weight"] = head
    return weights


def _layer_weights(rng: np.random.RandomState, prefix: str) -> Weights:
    shapes = {
        "self_attn.q_proj": (NUM_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.k_proj": (NUM_KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj": (NUM_KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_SIZE),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
    }
    weights = {
        f"{prefix}.{name}.weight": _normal(rng, rows, columns, scale=columns**-0.5)
        for name, (rows, columns) in shapes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _normal(
    rng: np.random.RandomState, rows: int, columns: int, *, scale: float
) -> NDArray[np.float32]:
    return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)


def _unsayable(tokenizer: Tokenizer) -> list[int]:
    """Tokens that greedy decoding must not pick: half characters, control bytes, markers."""
    tokens = ((tokenizer.decode([number]), number) for number in range(VOCABULARY))
    special = set(range(len(SPECIAL_TOKENS))) - {TURN_END_ID}
    unprintable = {
        number for text, number in tokens if not (text.isascii() and text.strip().isprintable())
    }
    return sorted((special | unprintable) - {TURN_END_ID})
