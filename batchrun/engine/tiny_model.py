"""A random-weight Llama and its tokenizer, built locally: small enough for any machine.

It is real in every code path and says nothing sensible: its text is noise. The same bytes come
out every time, without torch and without a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    build_folder(path, FILES, model_config(), _contents)


def build_folder(
    path: Path,
    names: Sequence[str],
    config: Mapping[str, object],
    make: Callable[[], Mapping[str, bytes]],
) -> None:
    """Write a model's files to the folder `path`, as `build_tiny_model` does its own: `config` is
    that of `config.json`, by which a folder is known, and `make` gives all of the named files."""
    if _is_built(path, names, config):
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
            for name, content in make().items():
                (Path(unfinished) / name).write_bytes(content)
            _move(Path(unfinished), path, lambda: _is_built(path, names, config))
    except OSError as error:
        is_no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        why = f"{path.parent} is not a folder" if is_no_folder else error.strerror
        raise InputError(f"{path}: cannot be written: {why}") from error


def _is_built(path: Path, names: Sequence[str], config: Mapping[str, object]) -> bool:
    if not all((path / name).is_file() for name in names):
        return False
    return (path / "config.json").read_bytes() == json_bytes(config)


def _move(source: Path, target: Path, is_built: Callable[[], bool]) -> None:
    """Rename; another process that was quicker has built the same bytes."""
    source.chmod(0o755)
    try:
        source.replace(target)
    except OSError:
        if not is_built():
            raise


def _contents() -> dict[str, bytes]:
    tokenizer = train_tokenizer(SPECIAL_TOKENS)
    weights = language_weights(tokenizer, len(SPECIAL_TOKENS))
    return {
        "config.json": json_bytes(model_config()),
        "model.safetensors": save(weights, {"format": "pt"}),
        **tokenizer_files(tokenizer, SPECIAL_TOKENS, CHAT_TEMPLATE),
    }


def tokenizer_files(
    tokenizer: Tokenizer, special_tokens: Sequence[str], chat_template: str
) -> dict[str, bytes]:
    """The tokenizer, what there is to know of it, and with which tokens an answer ends."""
    generation = {"eos_token_id": [TURN_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    others = [token for token in special_tokens if token not in {TURN_END, END_OF_TEXT}]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": others,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    return {
        "generation_config.json": json_bytes(generation),
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json_bytes(config),
    }


def json_bytes(value: object) -> bytes:
    """`value` as a file of a model."""
    return (json.dumps(value, indent=2) + "\n").encode()


def model_config() -> dict[str, object]:
    """The language model: a Llama."""
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


def train_tokenizer(special_tokens: Sequence[str]) -> Tokenizer:
    """A tokenizer with `VOCABULARY` tokens, of which these are the first."""
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that a number costs the same wherever it occurs.
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_corpus(), trainer)
    return tokenizer


def language_weights(tokenizer: Tokenizer, num_special: int) -> Weights:
    """The Llama's weights. Of the first `num_special` tokens it says the turn's end only."""
    # RandomState, not default_rng: numpy promises that its stream never changes.
    rng = np.random.RandomState(SEED)
    weights = {"model.embed_tokens.weight": normal(rng, VOCABULARY, HIDDEN, scale=1.0)}
    for layer in range(NUM_LAYERS):
        weights |= _layer_weights(rng, f"model.layers.{layer}")
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    head = normal(rng, VOCABULARY, HIDDEN, scale=3.0 / HIDDEN**0.5)
    head[_unsayable(tokenizer, num_special)] = 0.0
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
        f"{prefix}.{name}.weight": normal(rng, rows, columns, scale=columns**-0.5)
        for name, (rows, columns) in shapes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def normal(rng: np.random.RandomState, *shape: int, scale: float) -> NDArray[np.float32]:
    """Random weights."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _unsayable(tokenizer: Tokenizer, num_special: int) -> list[int]:
    """Tokens that greedy decoding must not pick: half characters, control bytes, markers."""
    tokens = ((tokenizer.decode([number]), number) for number in range(VOCABULARY))
    special = set(range(num_special)) - {TURN_END_ID}
    unprintable = {
        number for text, number in tokens if not (text.isascii() and text.strip().isprintable())
    }
    return sorted((special | unprintable) - {TURN_END_ID})
