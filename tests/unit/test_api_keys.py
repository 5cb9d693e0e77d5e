"""API keys: their text, the list that gateways follow, and requests counted by many workers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import multiprocessing
from contextlib import closing
from pathlib import Path

import pytest
from cli_call import cli_in

from batchrun.errors import ConfigError
from batchrun.hints import SloBounds
from batchrun.home import Home
from batchrun.keys import digest, id_in, new_key
from batchrun.server.api.key_list import KeyList, asks_for_none
from batchrun.server.gateway.admission import (
    MAX_HELD_REFUSALS,
    ApiKey,
    CallsAtOnce,
    KeyRing,
    RequestRates,
    SlowedKeys,
    check_class,
    read_keys,
)
from batchrun.server.gateway.envelope import RefusalError
from batchrun.store.api_keys import MAX_COUNT, KeyLimits, NewApiKey
from batchrun.store.database import open_store

MINE_ID, MINE = new_key()
OPS_ID, OPS = new_key()


def listed(key_id: str, text: str, role: str = "user") -> dict[str, object]:
    return {
        "id": key_id,
        "sha256": digest(text),
        "role": role,
        "slo_class": None,
        "requests_per_minute": None,
        "seq": 1,
    }


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [listed(MINE_ID, MINE), listed(OPS_ID, OPS, "admin")]}))
    ring = KeyRing()
    ring.replace(read_keys(path))
    return ring


def admitted(ring: KeyRing, authorization: str | None, path: str = "/v1/models") -> ApiKey | int:
    try:
        key = ring.admit(authorization, path)
    except RefusalError as refusal:
        return refusal.status
    assert key is not None
    return key


def test_a_text_names_its_key_and_no_two_are_alike() -> None:
    made = [new_key() for _ in range(100)]
    assert [id_in(text) for _, text in made] == [key_id for key_id, _ in made]
    assert len({text for _, text in made}) == 100
    assert {id_in(text) for text in ("", "sk-br-", MINE[:-1], f"{MINE}a", MINE.upper())} == {None}


def test_only_the_whole_text_of_a_listed_key_is_let_in(ring: KeyRing) -> None:
    key = admitted(ring, f"Bearer {MINE}")
    assert isinstance(key, ApiKey) and key.id == MINE_ID
    assert admitted(ring, f"bearer  {MINE} ") == key
    of_other = OPS[: OPS.index("-", 7) + 1] + MINE[MINE.index("-", 7) + 1 :]
    wrong = [
        MINE[:-1],
        MINE[:-1] + "~",
        of_other,
        MINE_ID,
        digest(MINE),
        "ü",
        "a b",
        "\0",
        "\udcff",
    ]
    assert {admitted(ring, f"Bearer {text}") for text in wrong} == {401}
    assert {admitted(ring, text) for text in (None, "", "Bearer", "Bearer ", f"Basic {MINE}")} == {
        401
    }


def test_a_wrong_key_is_not_repeated(ring: KeyRing) -> None:
    with pytest.raises(RefusalError) as refused:
        ring.admit(f"Bearer {MINE}x", "/v1/models")
    assert MINE[:20] not in refused.value.message
    assert refused.value.code == "invalid_api_key"


def test_what_is_open_and_what_is_for_admins(ring: KeyRing) -> None:
    assert ring.admit(None, "/healthz") is None
    assert admitted(ring, f"Bearer {MINE}", "/metrics") == 403
    assert isinstance(admitted(ring, f"Bearer {OPS}", "/metrics"), ApiKey)


def test_without_a_list_nobody_is_asked_and_an_empty_one_lets_nobody_in() -> None:
    ring = KeyRing()
    assert ring.admit(None, "/v1/models") is None
    ring.replace(())
    assert admitted(ring, f"Bearer {MINE}") == 401


def test_a_list_is_not_taken_back_when_a_store_of_before_the_first_key_is(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with_key, without = (open_store(tmp_path / name / "store.db") for name in ("new", "old"))
    KeyList(without, path).publish()
    assert (read_keys(path), asks_for_none(path)) == (None, True)
    KeyList(with_key, path).add(NewApiKey(MINE_ID, "mine", "user", digest(MINE)))
    KeyList(without, path).publish()
    assert (read_keys(path), asks_for_none(path)) == ((), False)
    with_key.close()
    without.close()


def test_a_key_without_a_limit_is_told_to_gateways_as_that(tmp_path: Path) -> None:
    path, free = tmp_path / "keys.json", KeyLimits(MAX_COUNT, concurrent_calls=MAX_COUNT)
    with closing(open_store(tmp_path / "store.db")) as store:
        keys = KeyList(store, path, KeyLimits(requests_per_minute=6))
        keys.add(NewApiKey(MINE_ID, "mine", "user", digest(MINE), limits=free))
        keys.add(NewApiKey(OPS_ID, "other", "user", digest(OPS)))
    mine, other = read_keys(path) or ()

    assert (mine.requests_per_minute, mine.concurrent_calls) == (None, None)
    assert (other.requests_per_minute, other.concurrent_calls) == (6, None)


async def test_keys_are_published_while_what_they_have_used_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HEARD_S", "TELL_S"):
        monkeypatch.setattr(f"batchrun.server.api.key_list.{name}", 0.01)
    store, path = open_store(tmp_path / "store.db"), tmp_path / "keys.json"
    path.with_suffix(".usage").mkdir()
    keeping = asyncio.create_task(KeyList(store, path).keep_published())
    for _ in range(3):
        while not (path.exists() and caplog.messages):
            await asyncio.sleep(0.01)
        path.unlink()
    keeping.cancel()
    store.close()
    (said,) = caplog.messages
    assert said.startswith("what API keys have used cannot be told: ")


def test_keys_list_says_who_is_let_in_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli, home = cli_in(tmp_path, monkeypatch, capsys), Home(tmp_path / "home")
    assert "from the first one on, every call needs one" in cli("keys", "list")[1]
    home.create()
    home.api_keys.write_text('{"keys": []}')
    assert "nobody is let in until `keys create` makes one" in cli("keys", "list")[1]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"keys": [1]}', '{"keys": [{"id": "a"}]}', "[" * 100_000, "{}"],
)
def test_what_is_no_list_of_keys_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a list of API keys") as caught:
        read_keys(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_bucket_fills_evenly_and_holds_a_minute(tmp_path: Path) -> None:
    now_s = 100.0
    rates = RequestRates(tmp_path / "rates", lambda: now_s)
    taken = [rates.take(1, 3) for _ in range(4)]
    assert [rate.num_left for rate in taken] == [2, 1, 0, 0]
    assert [rate.retry_after_s for rate in taken] == [None, None, None, 20.0]
    assert taken[2].headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60000ms",
    }
    assert taken[3].headers["Retry-After"] == "20"
    assert rates.take(2, 3).num_left == 2
    now_s = 119.0
    assert rates.take(1, 3).retry_after_s == pytest.approx(1.0)
    now_s = 120.0
    assert rates.take(1, 3).retry_after_s is None
    now_s = 1000.0
    assert rates.take(1, 3).num_left == 2
    now_s = 5.0
    assert rates.take(1, 3).num_left == 2
    rates.close()


def test_a_clock_a_little_behind_that_of_another_worker_fills_no_bucket(tmp_path: Path) -> None:
    now_s = 100.0
    with closing(RequestRates(tmp_path / "rates", lambda: now_s)) as rates:
        assert [rates.take(1, 2).num_left for _ in range(2)] == [1, 0]
        now_s = 99.999
        assert rates.take(1, 2).retry_after_s == 30.0


def is_row_free(path: Path, seq: int) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 16, seq * 16)
        except BlockingIOError:
            return False
    return True


def test_the_clock_is_read_when_no_other_worker_can_take(tmp_path: Path) -> None:
    path = tmp_path / "rates"
    found: list[bool] = []
    with multiprocessing.get_context("spawn").Pool(1) as pool:

        def clock_s() -> float:
            found.append(pool.apply(is_row_free, (path, 1)))
            return 100.0

        with closing(RequestRates(path, clock_s)) as rates:
            rates.take(1, 3)
        assert [*found, pool.apply(is_row_free, (path, 1))] == [False, True]


def take_many(path: Path, num: int) -> int:
    rates = RequestRates(path, lambda: 9.0)
    return sum(rates.take(7, 50).retry_after_s is None for _ in range(num))


def test_workers_share_one_count(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        let_through = pool.starmap(take_many, [(tmp_path / "rates", 200)] * 2)
    assert sum(let_through) == 50


def test_calls_at_once_are_counted_over_all_workers_and_those_of_a_dead_one_forgotten(
    tmp_path: Path,
) -> None:
    path = tmp_path / "calls"
    one, other = CallsAtOnce(path, 2, 0), CallsAtOnce(path, 2, 1)
    with one.calling(7, 2), other.calling(7, 2):
        for worker in (one, other):
            with pytest.raises(RefusalError) as refused, worker.calling(7, 2):
                raise AssertionError("a third call came in")
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
        assert refused.value.response("r").headers["Retry-After"] == "1"
        with one.calling(8, 1):
            assert one.num_calls(8) == 1
    assert one.num_calls(7) == 0

    dying = other.calling(7, 2)
    dying.__enter__()
    with one.calling(7, 2):
        new = CallsAtOnce(path, 2, 1)
        assert new.num_calls(7) == 1
    for each in (one, other, new):
        each.close()


CLASSES = {"fast": SloBounds(0.1, 0.02), "slow": SloBounds(9.0, 1.0), "whole": SloBounds(2, 1, 60)}
DEFAULT = SloBounds(1.0, 0.05)


@pytest.mark.parametrize(
    ("role", "own", "wanted", "is_taken"),
    [
        ("user", None, None, True),
        ("user", None, "slow", True),
        ("user", None, "fast", False),
        ("user", None, "whole", False),
        ("user", "fast", "fast", True),
        ("user", "fast", "slow", True),
        ("user", "slow", None, False),
        ("user", "slow", "slow", True),
        ("admin", None, "fast", True),
    ],
)
def test_no_user_key_is_served_before_others_by_a_class_that_is_not_its_own(
    role: str, own: str | None, wanted: str | None, *, is_taken: bool
) -> None:
    key = ApiKey("key_1", "0" * 64, "admin" if role == "admin" else "user", own, None, 1)
    bounds = None if wanted is None else CLASSES[wanted]

    try:
        check_class(key, bounds, CLASSES, DEFAULT)
    except RefusalError as refusal:
        error = json.loads(refusal.body)["error"]
        assert (refusal.status, error["param"], is_taken) == (400, "x-batchrun-class", False)
    else:
        assert is_taken


@pytest.mark.parametrize(("own", "is_taken"), [(None, True), ("slow", False), ("gone", True)])
def test_a_class_is_not_left_where_engines_alone_know_the_bounds(
    own: str | None, *, is_taken: bool
) -> None:
    key = ApiKey("key_1", "0" * 64, "user", own, None, 1)
    if is_taken:
        check_class(key, None, CLASSES, None)
    else:
        with pytest.raises(RefusalError, match="no class may have more value"):
            check_class(key, None, CLASSES, None)


async def told_at_once(keys: SlowedKeys, seq: int, num: int) -> list[bool]:
    """Of so many calls of a key that are refused together, which hear of it at once."""
    waits = [asyncio.create_task(keys.wait(seq, is_refused=True)) for _ in range(num)]
    await asyncio.sleep(0)
    told = [wait.done() for wait in waits]
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return told


def test_who_calls_on_after_a_refusal_hears_of_the_next_one_later() -> None:
    async def refuse() -> None:
        keys = SlowedKeys()

        assert await told_at_once(keys, 1, 3) == [True, False, False]
        assert await told_at_once(keys, 2, 1) == [True]

    asyncio.run(refuse())


def test_few_refusals_are_held_and_none_of_those_whose_callers_left() -> None:
    async def refuse() -> None:
        keys = SlowedKeys()

        for _ in range(2):
            told = await told_at_once(keys, 1, MAX_HELD_REFUSALS + 3)
            assert told.count(False) == MAX_HELD_REFUSALS
            assert told[-1]

    asyncio.run(refuse())


def test_what_follows_a_refusal_waits_and_what_other_keys_ask_does_not() -> None:
    async def ask() -> list[bool]:
        keys = SlowedKeys()
        await keys.wait(1)
        keys.note(1)
        after = [asyncio.create_task(keys.wait(seq)) for seq in (1, 2)]
        await asyncio.sleep(0)
        return [each.done() for each in after]

    assert asyncio.run(ask()) == [False, True]
