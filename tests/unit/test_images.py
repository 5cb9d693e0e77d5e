"""What an image is, where a request names it, and what it counts in a prompt."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from image_builders import bomb, data_url_of, image_body, picture, png
from PIL import Image

from batchrun.files import allow_many_open_files
from batchrun.jobs.inputs.input_data import InputData, open_input, open_pinned
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.pin import keep_input
from batchrun.jobs.prompts.image_tokens import (
    IMAGE_TOKEN_BYTES,
    ImageTokens,
    num_image_tokens,
    show_images,
)
from batchrun.jobs.prompts.prompt_text import prefix_text
from batchrun.jobs.prompts.template import RequestTemplate, RowRenderError
from batchrun.jobs.prompts.tokens import PromptReader
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import plan_job
from batchrun.media.images import (
    IMAGE_LIMIT_BYTES,
    MAX_CHUNKS,
    ImageError,
    check_media,
    media_urls,
    read_image,
    with_urls,
    without_cache_names,
)


def template_of(path: Path, messages: object, column: str) -> RequestTemplate:
    """The template of a job with this input, of which one column is used."""
    document = {
        "name": "x",
        "input": {"path": str(path), "messages": messages},
        "output": {"path": "/out.jsonl"},
    }
    return RequestTemplate(JobSpec.model_validate(document), [column], model="m")


def jpeg_with(marker: bytes, data: bytes) -> bytes:
    """A picture with 20 such segments before its own."""
    raw = picture(kind="JPEG", size=(40, 30))
    return raw[:2] + (b"\xff" + marker + struct.pack(">H", len(data) + 2) + data) * 20 + raw[2:]


def test_a_jpeg_may_have_much_that_no_decoder_takes_apart() -> None:
    for marker, data in ((b"\xe2", b"ICC_PROFILE\0"), (b"\xe1", b"http://"), (b"\xfe", b"Exif")):
        assert read_image(jpeg_with(marker, data + bytes(60_000))).width == 40


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_an_image_of_a_known_format_is_read(kind: str) -> None:
    image = read_image(picture(kind=kind, size=(40, 30)))
    assert (image.width, image.height) == (40, 30)
    assert image.media_type == f"image/{kind.lower()}"


UPRIGHT = Image.Exif()
UPRIGHT[0x0112] = 6


@pytest.mark.parametrize(
    ("exif", "size"), [(UPRIGHT, (30, 40)), (b"Exif\0\0garbage header", (40, 30))]
)
@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_picture_taken_upright_has_its_sides_swapped_where_that_can_be_read(
    kind: str, exif: Image.Exif | bytes, size: tuple[int, int]
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, kind, exif=exif, dpi=(72, 72))
    image = read_image(file.getvalue())
    assert (image.width, image.height) == size


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "broken"),
        (b"no image", "of no known format"),
        (picture()[:20], "broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "of no known format"),
        (bomb(20_000, 20_000), "64 million pixels"),
        (bomb(9_000, 9_000), "64 million pixels"),
        (bytes(IMAGE_LIMIT_BYTES + 1), "over 32 MiB"),
        (png(4, 5, *[(b"teXt", b"")] * MAX_CHUNKS), "over 50,000 chunks"),
        (png(4, 5, *[(b"iCCP", b"a\0\0" + zlib.compress(b""))] * 17), "over 16 colour profiles"),
        (b"\xff\xd8" + b"\xff\xfe\x00\x02" * 8_000_000, "over 2,000 segments"),
        (b"\xff\xd8" + b"\xff\xfd" * 16_000_000, "over 2,000 segments"),
        (b"\xff\xd8" + bytes(IMAGE_LIMIT_BYTES - 2), "broken"),
        (jpeg_with(b"\xe1", b"Exif\0\0" + bytes(60_000)), "over 1 MiB of EXIF"),
        (jpeg_with(b"\xed", b"Photoshop 3.0\0" + bytes(60_000)), "over 1 MiB of EXIF"),
        (jpeg_with(b"\xdb", bytes(65 * 900)), "over 1 MiB of EXIF or tables"),
        (b"\xff\xd8" + b"\xff" * 300_000, "over 200,000 parts"),
        (b"GIF89a" + bytes(7) + b"!\xfe\1x\0" * 200_000, "over 200,000 parts"),
    ],
)
def test_what_is_no_image_or_too_large_a_one_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read_image(raw)


@pytest.mark.parametrize("kind", ["TIFF", "WEBP"])
def test_tags_that_a_decoder_would_be_long_at_are_refused(kind: str) -> None:
    tags = Image.Exif()
    tags[0x9999], tags[0x999A] = bytes(600_000), tuple(range(10**9, 10**9 + 60_000))
    short, long = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (4, 5)).save(short, kind, exif=tags)
    tags[0x999A] = tuple(range(10**9, 10**9 + 120_000))
    Image.new("RGB", (4, 5)).save(long, kind, exif=tags)
    assert read_image(short.getvalue()).width == 4
    with pytest.raises(ImageError, match=r"of EXIF|of numbers in one tag"):
        read_image(long.getvalue())


def test_a_png_whose_pixels_go_on_in_what_is_no_chunk_is_refused() -> None:
    pixels = zlib.compress(bytes((1 + 3 * 4) * 5), level=0)
    whole, broken = [
        png(4, 5, (b"IDAT", pixels[:30]), (kind, pixels[30:]))
        for kind in (b"IDAT", b"I\x12\x12\x12")
    ]
    assert read_image(whole).width == read_image(whole[:-40]).width == 4
    with pytest.raises(SyntaxError, match="broken PNG"):
        Image.open(io.BytesIO(broken)).load()
    with pytest.raises(ImageError, match="no chunk of a PNG follows its pixels; save it again"):
        read_image(broken)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (image_body("data:a", "http://b"), [("image", "data:a"), ("image", "http://b")]),
        ({"messages": [{"content": [{"image_url": "file:///c"}]}]}, [("image", "file:///c")]),
        (
            {"input": [{"content": [{"type": "input_image", "image_url": "http://d"}]}]},
            [("image", "http://d")],
        ),
        (
            {"input": [{"type": "computer_call_output", "output": {"image_url": "http://e"}}]},
            [("image", "http://e")],
        ),
        (
            {"messages": [{"content": [{"video_url": {"url": "http://f"}}]}]},
            [("video", "http://f")],
        ),
        ({"messages": [{"role": "user", "content": '{"image_url": "http://g"}'}]}, []),
        ({"messages": [], "tools": [{"image_url": {"url": "a parameter"}}]}, []),
        ({"prompt": "image_url", "input": ["image_url", "http://h"]}, []),
    ],
)
def test_images_are_found_wherever_an_engine_would_look(
    body: dict[str, object], found: list[tuple[str, str]]
) -> None:
    assert list(media_urls(body)) == found
    changed = with_urls(body, lambda kind, url: f"{kind} {url}")
    assert list(media_urls(changed)) == [(kind, f"{kind} {url}") for kind, url in found]
    assert list(media_urls(body)) == found


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:image/png;base64,????", "not valid base64"),
        ("data:image/png,abc", "must be written as"),
        (data_url_of(b"no image"), "of no known format"),
        (data_url_of(bomb(9_000, 9_000)), "million pixels"),
        ("file:///etc/passwd", "http://"),
        ("ftp://host/a.png", "http://"),
    ],
)
def test_a_row_with_a_faulty_image_ends_with_a_line_that_says_so(url: str, problem: str) -> None:
    template = template_of(Path("/rows.jsonl"), "{{ messages }}", "messages")
    with pytest.raises(RowRenderError, match=problem) as caught:
        template.render({"messages": image_body(url)["messages"]}, row_number=3)
    assert caught.value.row_error.code == "invalid_image"
    assert "\n" not in caught.value.row_error.message


@pytest.mark.parametrize(
    ("content", "may"),
    [
        ("{{ column }}", False),
        ([{"type": "text", "text": "{{ column }}"}], False),
        ([{"image": {"column": "column"}}], True),
        ([{"type": "image_url", "image_url": {"url": "http://a/{{ column }}"}}], True),
        ([{"type": "image_url", "image_url": {"url": "{{ column }}"}}], True),
        ([{"type": "input_image", "more": "{{ column }}"}], True),
    ],
)
def test_only_a_template_that_may_name_images_is_searched_for_them(
    content: object, *, may: bool
) -> None:
    messages = [{"role": "user", "content": content}]
    template = template_of(Path("/rows.jsonl"), messages, "column")
    assert template.may_name_media == may


def test_a_video_on_the_web_is_refused() -> None:
    part = {"type": "video_url", "video_url": {"url": "http://host/a.mp4"}}
    with pytest.raises(ImageError, match="video must come as a data URL"):
        check_media({"messages": [{"role": "user", "content": [part]}]})


def keys_of(*urls: str, text: str = "what?") -> bytes:
    return PromptReader().text(image_body(*urls, text=text))


def test_equal_images_are_equal_keys_however_they_come(tmp_path: Path) -> None:
    raw = picture()
    (tmp_path / "a.png").write_bytes(raw)
    (tmp_path / "copy.png").write_bytes(raw)
    content = [{"image": {"column": "image"}}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    template = template_of(tmp_path / "a.parquet", messages, "image")
    bodies = [
        template.render({"image": v}, row_number=0, folder=tmp_path)
        for v in ("a.png", "copy.png", raw)
    ]
    keys = {PromptReader().text(body) for body in bodies}
    keys |= {keys_of(data_url_of(raw)), keys_of(data_url_of(raw, "IMAGE/x;name=a"))}
    assert len(keys) == 1
    assert keys_of(data_url_of(picture(1))) not in keys


def test_other_images_end_what_rows_share() -> None:
    first, second, third = (data_url_of(picture(seed, (280, 280))) for seed in range(3))
    one, other = keys_of(first, second), keys_of(first, third)
    shared = next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert num_image_tokens(one[:shared]) == ImageTokens().count(280, 280) - 1


@pytest.mark.parametrize(
    "how",
    [{"mm_processor_kwargs": {"max_pixels": 9}}, {"media_io_kwargs": {"image": {"rgba": 1}}}],
)
def test_an_image_that_is_read_in_another_way_is_another(how: dict[str, object]) -> None:
    url = data_url_of(picture(size=(280, 280)))
    usual, other, same, unset = (
        PromptReader().text(image_body(url) | each)
        for each in ({}, how, {**how}, dict.fromkeys(how))
    )
    assert usual == unset and other == same
    assert usual != other and show_images(usual) == show_images(other)


def test_an_image_counts_its_tokens_in_the_text() -> None:
    text = keys_of(data_url_of(picture(size=(280, 560))), text="hi")
    num_tokens = 280 * 560 // 28**2
    assert num_image_tokens(text) == num_tokens - 1  # and one for the template's placeholder
    assert len(text) == len(prefix_text(image_body(text="hi"))) + (num_tokens - 1) * 4
    assert IMAGE_TOKEN_BYTES == 4
    assert show_images(text).endswith(b"[image]hi")


def test_a_text_that_imitates_an_image_counts_no_more_often_than_there_are_images() -> None:
    url = data_url_of(picture(size=(560, 560)))
    image = read_image(picture(size=(560, 560)))
    mark = prefix_text(image_body(image.digest, text="")).decode().removeprefix("<|user|>")
    once = num_image_tokens(keys_of(url))
    assert mark.startswith("<|")
    assert num_image_tokens(keys_of(url, text=mark * 1_000)) == once


@pytest.mark.slow
def test_a_model_without_a_processor_has_its_images_guessed(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = ImageTokens(tiny_model)
    assert images.count(280, 280) == images.count(280, 280) == 100
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    images.close()


PROCESSOR = """#!/bin/sh
echo ready
while read -r height width; do
    if [ "$height" = 1 ]; then echo "cannot tell: too flat"; else echo 7; fi
done
"""


def told_by_processor(folder: Path) -> ImageTokens:
    """Each image has 7 tokens; of one that is a line it cannot tell."""
    program = folder / "python"
    program.write_text(PROCESSOR)
    program.chmod(0o700)
    return ImageTokens(folder, program)


def test_a_size_that_the_processor_refuses_is_guessed_and_no_other(tmp_path: Path) -> None:
    images = told_by_processor(tmp_path)
    counts = [images.count(width, height) for width, height in ((7_840, 1), (9, 9), (7_840, 1))]
    images.close()
    assert counts == [10, 7, 10]


def test_the_processor_is_asked_where_many_files_are_open(tmp_path: Path) -> None:
    images, limits = told_by_processor(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as after:
        after.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        allow_many_open_files()
        for _ in range(1_024):
            after.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        after.callback(images.close)
        assert images.count(9, 9) == 7


@pytest.mark.parametrize("place", ["messages", "input"])
def test_no_caller_names_what_an_engine_caches(place: str) -> None:
    named = {"type": "image_url", "image_url": {"url": "data:x"}, "uuid": "another's"}
    text = {"type": "text", "text": "the uuid of a row"}
    body: dict[str, object] = {place: [{"role": "user", "content": [named, text]}], "uuid": 1}
    plain = {"type": "image_url", "image_url": {"url": "data:x"}}
    assert without_cache_names(body) == {
        place: [{"role": "user", "content": [plain, text]}],
        "uuid": 1,
    }
    assert "uuid" in named
    outputs = [{"type": "function_call_output", "call_id": "c", "output": [named]}]
    assert without_cache_names({place: outputs}) == {place: [outputs[0] | {"output": [plain]}]}


@pytest.mark.parametrize(
    "messages", [None, 3, ["uuid"], [{"content": "uuid"}], [{"content": [{"text": "uuid"}, 1]}]]
)
def test_a_body_that_names_nothing_stays_as_it_is(messages: object) -> None:
    body: dict[str, object] = {"messages": messages, "tools": [{"uuid": "u"}]}
    assert without_cache_names(body) is body


@pytest.mark.parametrize("paths", [["a/rows.jsonl", "b/rows.jsonl"], "*/rows.jsonl"])
def test_a_row_has_the_image_beside_its_own_file(tmp_path: Path, paths: object) -> None:
    asked: list[bytes] = []
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(picture(seed))
        (tmp_path / name / "rows.jsonl").write_text('{"image": "1.png"}\n')
        asked.append(keys_of(data_url_of(picture(seed))))
    content = [{"image": {"column": "image"}}, {"type": "text", "text": "what?"}]
    document = {"name": "x", "output": {"path": "out.jsonl"}}
    document |= {"input": {"path": paths, "messages": [{"role": "user", "content": content}]}}
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    spec = load_job_file(tmp_path / "job.yaml", cwd=tmp_path)
    template = RequestTemplate(spec, ["image"], model="m")

    def texts(data: InputData) -> list[bytes]:
        found: list[bytes] = []
        with data:
            plan_job(spec, data, template, watch=lambda texts, _: found.extend(texts))
        return found

    data = open_input(spec.input)
    pin = keep_input(data.pin(), {}, tmp_path / "links")
    assert texts(data) == asked
    for name in "ab":
        (tmp_path / name / "rows.jsonl").unlink()
    assert texts(open_pinned(spec.input, pin, links=tmp_path / "links")) == asked
