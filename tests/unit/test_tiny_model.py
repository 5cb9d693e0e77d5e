"""The tiny model: complete, the same each time, and careful with folders."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from batchrun.engine.tiny_model import FILES, build_tiny_model
from batchrun.engine.tiny_vision_model import (
    SEEN_TOKENS,
    VISION_FILES,
    build_tiny_vision_model,
)
from batchrun.errors import InputError

Message = dict[str, object]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def read_json(path: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads(path.read_text())
    return document


def render(folder: Path, messages: list[Message], **options: object) -> str:
    template = str(read_json(folder / "tokenizer_config.json")["chat_template"])
    environment = jinja2.Environment(autoescape=False, undefined=jinja2.ChainableUndefined)
    return environment.from_string(template).render(messages=messages, **options)


def test_another_process_builds_the_same_bytes(tiny_model: Path, tmp_path: Path) -> None:
    program = "import sys, pathlib; from batchrun.engine.tiny_model import build_tiny_model\n"
    program += "build_tiny_model(pathlib.Path(sys.argv[1]))\n"
    program += "assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "again")], check=True)
    assert digests(tmp_path / "again") == digests(tiny_model)
    assert sorted(digests(tiny_model)) == sorted(FILES)


def test_building_again_changes_nothing(tiny_model: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in tiny_model.iterdir()}
    build_tiny_model(tiny_model)
    assert {file.name: file.stat().st_mtime_ns for file in tiny_model.iterdir()} == before


def test_an_empty_folder_is_filled_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    build_tiny_model(tmp_path / "tiny")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="name another folder"):
        build_tiny_model(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_model_with_another_configuration_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="is not batchrun's tiny model"):
        build_tiny_model(tmp_path)


def test_a_path_below_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder") as caught:
        build_tiny_model(tmp_path / "file" / "tiny")
    assert "\n" not in str(caught.value)


def test_no_room_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    program = "import pathlib, resource, sys\n"
    program += "from batchrun.engine.tiny_model import build_tiny_model\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
    program += "build_tiny_model(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path / "tiny")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    last_line = ended.stderr.strip().splitlines()[-1]
    assert last_line.endswith(f"InputError: {tmp_path}/tiny: cannot be written: File too large")
    assert list(tmp_path.iterdir()) == []


def test_the_weights_have_the_sizes_that_the_configuration_names(tiny_model: Path) -> None:
    config, weights = (
        read_json(tiny_model / "config.json"),
        load_file(tiny_model / "model.safetensors"),
    )
    assert (config["num_hidden_layers"], config["hidden_size"]) == (4, 256)
    assert weights["lm_head.weight"].shape == (config["vocab_size"], 256)
    assert weights["model.layers.3.mlp.up_proj.weight"].shape == (config["intermediate_size"], 256)
    assert len(weights) == 3 + 4 * 9


def test_greedy_text_is_printable(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    head = load_file(tiny_model / "model.safetensors")["lm_head.weight"]
    sayable = [number for number in range(len(head)) if head[number].any()]
    assert len(sayable) > 1500
    assert all(tokenizer.decode([number]).isascii() for number in sayable)


@pytest.mark.parametrize("text", ["The river 42.", "Ünïcode “quotes” 漢字 🙂", " \n\t x", "{}[]"])
def test_every_text_survives_the_tokenizer(tiny_model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2048
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_markers_of_a_turn_are_one_token_each(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|><|im_end|><|endoftext|>").ids == [1, 2, 0]
    assert read_json(tiny_model / "generation_config.json")["eos_token_id"] == [2, 0]


def test_a_conversation_is_rendered_turn_by_turn(tiny_model: Path) -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert render(tiny_model, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_stand_between_the_system_prompt_and_the_conversation(tiny_model: Path) -> None:
    messages: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = render(tiny_model, messages, tools=[{"name": "find"}, {"name": "sort"}])
    assert text == (
        '<|im_start|>system\nS\n\n# Tools\n\n{"name": "find"}\n{"name": "sort"}<|im_end|>\n'
        "<|im_start|>user\nU<|im_end|>\n"
    )


def test_a_tool_call_of_the_assistant_is_rendered(tiny_model: Path) -> None:
    call = {"function": {"name": "find", "arguments": "{}"}}
    message: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = render(tiny_model, [{"role": "user", "content": "U"}, message])
    assert '<tool_call>{"arguments": "{}", "name": "find"}</tool_call><|im_end|>' in text


def test_the_vision_model_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        build_tiny_vision_model(folder)
    assert digests(first) == digests(second)
    assert sorted(digests(first)) == sorted(VISION_FILES)


def test_images_stand_in_a_conversation_where_they_were_put(tmp_path: Path) -> None:
    build_tiny_vision_model(tmp_path / "model")
    content = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " A?"}]
    text = render(tmp_path / "model", [{"role": "user", "content": content}])
    assert text == "<|im_start|>user\nIs <image> A?<|im_end|>\n"
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("<image><row_6_col_6>").ids == [3, len(SEEN_TOKENS) - 1]
