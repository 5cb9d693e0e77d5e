"""The text that prefix keys are made of."""

from __future__ import annotations

from batchrun.jobs.prompts.prompt_text import prefix_text

DOCUMENT = "a long document " * 50


def chat(*messages: tuple[str, object], **fields: object) -> bytes:
    items = [{"role": role, "content": content} for role, content in messages]
    return prefix_text({"model": "m", "messages": items, **fields})


def shared_bytes(first: bytes, second: bytes) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_questions_on_one_document_share_it() -> None:
    first = chat(("user", DOCUMENT + "who?"))
    second = chat(("user", DOCUMENT + "when?"))
    assert shared_bytes(first, second) >= len(DOCUMENT)


def test_tools_stand_between_system_and_user_text() -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    text = chat(("system", "You help."), ("user", "why?"), tools=tools).decode()
    assert text.index("You help.") < text.index("search") < text.index("why?")


def test_roles_keep_equal_texts_apart() -> None:
    assert chat(("user", "a"), ("assistant", "b")) != chat(("user", "a"), ("user", "b"))


def test_different_images_end_the_shared_prefix() -> None:
    def with_image(url: str) -> bytes:
        image = {"type": "image_url", "image_url": {"url": url}}
        return chat(("user", [image, {"type": "text", "text": DOCUMENT}]))

    assert shared_bytes(with_image("data:a"), with_image("data:b")) < 64
    assert with_image("data:a") == with_image("data:a")


def test_prompts_inputs_and_responses_have_their_text() -> None:
    assert prefix_text({"prompt": "héllo"}) == "héllo".encode()
    assert prefix_text({"prompt": [1, 2, 3]}) == b"[1,2,3]"
    assert prefix_text({"input": "text"}) == b"text"
    responses = prefix_text({
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": "x"}],
    })
    assert responses == b"<|system|>Be brief.<|user|>x"
