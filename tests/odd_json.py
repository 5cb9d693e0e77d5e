"""A grammar of odd JSON: texts that are nearly replies of an engine, or nearly lines of a batch."""

from __future__ import annotations

import json
from random import Random

ATOMS: tuple[bytes, ...] = (
    b"null", b"true", b"0", b"-0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"01", b"1.", b".5",
    b"9" * 400, b"9" * 5_000, b"-" + b"9" * 4_301, b"0." + b"3" * 400, b"1E+0000000000000000001",
    b'""', b'"stop"', b'"abort"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"',
    b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"', b'"\0"', b'"\\u0000"', b'"\x1b[31m"',
    b'"\x7f\xc2\x9b"',
    b'"\\x41"', b'"\n"', b'"\xe2\x80\xa8"', b'"\xef\xbb\xbf"', b'"a\\"', b'"' + b"\\\\" * 9 + b'"',
    b"{}", b"[]", b"[1,]", b"{,}", b'{"a":1,"a":2}', b'{"\\ud800":1}', b"'a'", b"",
    b"[" * 190 + b"]" * 190, b"[" * 250 + b"]" * 250, b'{"a":' * 700 + b"1" + b"}" * 700,
    b"2147483648", b"4e3", b"-5", b"\xef\xbb\xbf1", b"/**/1", b"undefined",
)  # fmt: skip
BLANKS = (b"", b" ", b"\t", b"\n", b"\r\n", b"\x0c", b"\0", b"\xc2\xa0", b"\xef\xbb\xbf")
REPLY = {
    "id": "cmpl-1",
    "choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}


def odd_reply(rng: Random) -> bytes:
    """The body of a reply with up to three odd places in it."""
    return _odd(rng, REPLY)


def odd_line(rng: Random, number: int) -> bytes:
    """A line of a batch with up to three odd places in it; without its end."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return _odd(
        rng,
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body},
    )


def _odd(rng: Random, document: object) -> bytes:
    text = _write(rng, document, chance=rng.choice((0.0, 0.03, 0.15)))
    what = rng.random()
    if what < 0.05:
        text = text[: rng.randrange(len(text) + 1)]
    elif what < 0.1:
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.randbytes(1) + text[place + 1 :]
    elif what < 0.2:
        text = rng.choice(BLANKS) + text + rng.choice(BLANKS)
    elif what < 0.23:
        text = text.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    return text


def _write(rng: Random, value: object, *, chance: float) -> bytes:
    """`value` as JSON, each part of it with this chance another."""
    if rng.random() < chance:
        return rng.choice(ATOMS)
    blank = rng.choice(BLANKS[:5]) if rng.random() < chance else b""
    if isinstance(value, dict):
        pairs = [(json.dumps(key).encode(), item) for key, item in value.items()]
        if rng.random() < chance:
            pairs.append((rng.choice(pairs)[0], "again"))
        written = (key + b":" + blank + _write(rng, item, chance=chance) for key, item in pairs)
        return b"{" + blank + b",".join(written) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(_write(rng, item, chance=chance) for item in value) + blank + b"]"
    return json.dumps(value).encode()
