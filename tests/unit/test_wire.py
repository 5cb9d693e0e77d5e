"""Messages between daemon and engine: what is read, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from batchrun.wire import (
    MAX_JOBS,
    MAX_MESSAGE_BYTES,
    Answer,
    ClassTelemetry,
    Orders,
    OrdersError,
    Telemetry,
    encode,
    read_message,
    read_orders,
)

NONCE = "secret"
ORDERS = Orders(NONCE, 3, 7, "echo", 512, is_offline_on=False, renew=("a", "b"), forget=("c",))


def changed(**fields: object) -> bytes:
    """Orders with other fields, whatever they are."""
    return msgspec.msgpack.encode(msgspec.to_builtins(ORDERS) | fields)


def test_every_message_is_read_as_it_was_sent() -> None:
    telemetry = Telemetry(
        "start", 1.5, "echo", 2048, is_offline_on=True, offline=ClassTelemetry(num_running=4)
    )
    answer = Answer(7, "bs", 512, is_offline_on=True, error="no")

    assert read_orders(encode(ORDERS), NONCE) == ORDERS
    assert read_message(encode(telemetry), Telemetry) == telemetry
    assert read_message(encode(answer), Answer) == answer


def test_fields_of_a_later_version_are_ignored() -> None:
    assert read_orders(changed(colour="blue"), NONCE) == ORDERS


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"", "malformed"),
        (b"\xc1\xc1", "malformed"),
        (encode(ORDERS)[:-1], "malformed"),
        (b"\x91" * 60_000, "malformed"),
        (changed(policy="p" * 65), "policy"),
        (changed(token_budget="all"), "token_budget"),
        (changed(epoch=-1), "epoch"),
        (changed(renew=["job"] * (MAX_JOBS + 1)), "renew"),
        (changed(forget=["j" * 200]), "forget"),
        (changed(nonce="guess"), "nonce"),
        (changed(nonce=""), "nonce"),
        (changed(nonce=None), "nonce"),
        (changed(padding="x" * MAX_MESSAGE_BYTES), "at most"),
    ],
)
def test_other_orders_are_refused_in_one_line(message: bytes, says: str) -> None:
    with pytest.raises(OrdersError, match=says) as caught:
        read_orders(message, NONCE)
    assert "\n" not in str(caught.value)
    assert NONCE not in str(caught.value)


def test_an_engine_without_a_nonce_takes_no_orders() -> None:
    with pytest.raises(OrdersError, match="nonce"):
        read_orders(changed(nonce=""), "")


@pytest.mark.parametrize("message", [b"", b"\xc0", encode(ORDERS), b"x" * (MAX_MESSAGE_BYTES + 1)])
def test_a_malformed_report_is_an_error_and_no_more(message: bytes) -> None:
    with pytest.raises(ValueError):
        read_message(message, Telemetry)
