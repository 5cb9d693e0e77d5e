"""Reuse counts and next ranks, as hints come and rows end."""

from __future__ import annotations

import msgspec
import pytest
from cache_builders import chain_of, row_hint
from msgspec import UNSET

from batchrun.cache.eviction import ECHO_RC
from batchrun.cache.reuse import LEASE_S, ReuseIndex
from batchrun.hints import NodeHint


def announce(
    index: ReuseIndex, text: str, row: int, *nodes: tuple[int, int, int], epoch: int = 1
) -> list[bytes]:
    """Announce a row (rank = row) with one block per letter; returns the keys that fell."""
    hint = row_hint(row, row, tuple(NodeHint(*node) for node in nodes), epoch)
    return keys(index, index.announce(f"{row}", hint, chain_of(text), 0.0))


def keys(index: ReuseIndex, fallen: list) -> list[bytes]:  # type: ignore[type-arg]
    return [key for node in fallen for key in index.keys_of(node)]


def counts(index: ReuseIndex, text: str) -> list[int]:
    nodes = [index.blocks.get(key) for key in chain_of(text)]
    return [node.reuse_count if node else 0 for node in nodes]


def ranks(index: ReuseIndex, text: str) -> list[int | None]:
    nodes = [index.blocks.get(key) for key in chain_of(text)]
    return [node.next_rank if node else None for node in nodes]


def test_announced_rows_count_where_their_chains_agree() -> None:
    index = ReuseIndex()
    announce(index, "abcx", 3)
    announce(index, "abcy", 5)
    announce(index, "az", 4)
    assert counts(index, "abcx") == [3, 2, 2, 1]
    assert ranks(index, "abcy") == [3, 3, 3, 5]
    index.check()


def test_a_finished_row_counts_no_longer_and_the_next_one_comes_first() -> None:
    index = ReuseIndex()
    announce(index, "abx", 3)
    announce(index, "aby", 5)
    index.finished("3")
    assert counts(index, "abx") == [1, 1, 0]
    assert ranks(index, "abx") == [5, 5, None]
    index.finished("5")
    assert not index.blocks
    index.check()


def test_rows_to_come_count_for_the_blocks_that_rows_of_the_node_share() -> None:
    index = ReuseIndex()
    announce(index, "docx", 1, (7, 9, 2))
    announce(index, "docy", 2, (7, 8, 3))
    assert counts(index, "docx") == [10, 10, 10, 1]
    assert counts(index, "docy") == [10, 10, 10, 1]
    index.finished("1")
    index.finished("2")
    assert counts(index, "docx") == [8, 8, 8, 0]
    assert ranks(index, "doc") == [3, 3, 3]
    index.check()


def test_the_last_row_of_a_node_leaves_nothing_behind() -> None:
    index = ReuseIndex()
    announce(index, "docx", 1, (7, 1, 2))
    announce(index, "docy", 2, (7, 0, 0))
    assert counts(index, "docx") == [2, 2, 2, 1]
    index.finished("1")
    index.finished("2")
    assert not index.blocks


def test_an_outer_node_ends_where_its_documents_part() -> None:
    index = ReuseIndex()
    announce(index, "sysAx", 1, (1, 99, 2), (2, 4, 2))
    announce(index, "sysAy", 2, (1, 98, 3), (2, 3, 3))
    assert counts(index, "sysA") == [5, 5, 5, 5]
    announce(index, "sysBx", 6, (1, 94, 7), (3, 4, 7))
    assert counts(index, "sysAx") == [97, 97, 97, 5, 1]
    assert counts(index, "sysBx") == [97, 97, 97, 5, 5]
    assert ranks(index, "sysAx") == [1, 1, 1, 1, 1]
    index.check()


def test_jobs_with_a_common_prefix_add_up() -> None:
    index = ReuseIndex()
    for job in ("one", "two"):
        hint = row_hint(0, 0, (NodeHint(1, 3, 1),), job=job)
        index.announce(job, hint, chain_of("ab" + job), 0.0)
    assert counts(index, "ab") == [8, 8]
    index.forget("one")
    assert counts(index, "ab") == [4, 4]
    index.check()


def test_children_of_n_greater_than_one_are_one_row() -> None:
    index = ReuseIndex()
    hint = row_hint(4, 4, (NodeHint(1, 2, 5),))
    for child in range(3):
        index.announce(f"{child}_4", hint, chain_of("ab"), 0.0)
    assert counts(index, "ab") == [3, 3]
    index.finished("0_4")
    index.finished("1_4")
    assert counts(index, "ab") == [3, 3]
    index.finished("2_4")
    assert counts(index, "ab") == [2, 2]


def test_a_row_whose_prompt_fills_no_block_is_nothing_to_the_cache() -> None:
    index = ReuseIndex()
    announce(index, "", 1, (1, 5, 2))
    announce(index, "ab", 2, (1, 4, 3))
    assert counts(index, "ab") == [1, 1]
    index.finished("1")
    index.finished("2")
    assert not index.blocks


def test_a_newer_epoch_voids_the_older_and_older_hints_are_not_counted() -> None:
    index = ReuseIndex(ECHO_RC)
    announce(index, "ab", 1, (1, 5, 2))
    assert announce(index, "ax", 1, epoch=2) == [b"ab", b"a"]
    assert counts(index, "ab") == [1, 0]
    assert announce(index, "ab", 9, epoch=1) == []
    assert counts(index, "ab") == [1, 0]
    index.finished("9")
    index.check()


def test_a_lower_epoch_counts_once_no_lease_of_the_higher_one_lives() -> None:
    index = ReuseIndex()
    announce(index, "ab", 1, (1, 5, 2), epoch=7)
    index.renew(2, LEASE_S - 0.1)
    assert counts(index, "ab") == [6, 6]
    index.renew(2, LEASE_S)
    assert counts(index, "ab") == [0, 0]
    announce(index, "ab", 9, (1, 5, 2), epoch=2)
    assert counts(index, "ab") == [6, 6]
    index.check()


def test_counts_fall_to_nothing_when_the_lease_ends_and_return_with_it() -> None:
    index = ReuseIndex()
    announce(index, "ab", 1, (1, 5, 2))
    assert index.expire(LEASE_S - 0.1) == []
    assert keys(index, index.expire(LEASE_S)) == [b"ab", b"a"]
    assert counts(index, "ab") == [0, 0]
    index.renew(1, 2 * LEASE_S)
    assert counts(index, "ab") == [1, 1]
    index.check()


def test_a_renewed_lease_holds_for_the_jobs_that_are_named() -> None:
    index = ReuseIndex()
    for job in ("kept", "paused"):
        index.announce(job, row_hint(0, 0, job=job), chain_of(job), 0.0)
    index.renew(1, 20.0, ["kept"])
    index.expire(LEASE_S)
    assert counts(index, "kept") == [1] * 4
    assert counts(index, "paused") == [0] * 6
    index.finished("paused")
    index.check()


def test_what_falls_is_reported_when_a_waiting_row_is_aborted() -> None:
    index = ReuseIndex(ECHO_RC)
    announce(index, "abx", 1)
    announce(index, "aby", 2)
    assert sorted(keys(index, index.finished("2"))) == [b"a", b"ab", b"aby"]
    assert index.finished("2") == []


def test_keys_carry_the_suffix_of_the_kv_group() -> None:
    index = ReuseIndex(key_suffix=b"-0")
    index.announce("1", row_hint(1, 1), chain_of("ab"), 0.0)
    assert set(index.blocks) == {b"a-0", b"ab-0"}
    assert list(index.keys_of(index.blocks[b"a-0"])) == [b"ab-0", b"a-0"]


@pytest.mark.parametrize("front", [0, 40, 90])
def test_the_tier_follows_the_front(front: int) -> None:
    index = ReuseIndex()
    announce(index, "a", 41)
    announce(index, "b", 89)
    index.advance(front)
    index.advance(front - 5)
    tiers = [index.tier(index.blocks[key]) for key in (b"a", b"b")]
    assert (tiers[0] > tiers[1]) == (front < 89)


def test_followers_are_the_rows_of_the_key_portion_that_have_not_ended() -> None:
    index = ReuseIndex()
    announce(index, "docx", 1, (7, 3, 2))
    announce(index, "docy", 2, (7, 2, 3))
    assert [index.num_followers("1"), index.num_followers("2")] == [3, 3]

    index.finished("1")
    assert index.num_followers("2") == 2
    announce(index, "docz", 3, (7, 1, 4))
    announce(index, "docw", 4, (7, 0, 4))
    assert index.num_followers("2") == 2
    index.finished("3")
    index.finished("4")

    assert index.num_followers("2") == 0


def test_rows_to_come_of_a_job_that_was_cancelled_follow_no_more() -> None:
    index = ReuseIndex()
    announce(index, "docx", 1, (7, 9, 2))
    announce(index, "docy", 2, (7, 8, 3))

    index.forget("job")

    assert index.num_followers("1") == 1
    assert index.num_followers("unknown") == 0


def test_followers_count_by_the_node_that_the_hint_names() -> None:
    index = ReuseIndex()
    nodes = (NodeHint(1, 90, 2), NodeHint(5, 8, 2), NodeHint(6, 1, 2))
    for number, key in enumerate((5, 1, None, UNSET)):
        hint = msgspec.structs.replace(row_hint(number, number, nodes), key_node=key)
        index.announce(f"{number}", hint, chain_of(f"doc{number}"), 0.0)

    assert [index.num_followers(f"{number}") for number in range(4)] == [8, 90, 0, 1]


@pytest.mark.parametrize("sent", [(0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
def test_rows_that_come_in_another_order_leave_none_to_come(sent: tuple[int, ...]) -> None:
    """Four rows of one document; each says how many stand behind it in the planned order."""
    index = ReuseIndex()
    for row in sent:
        announce(index, "abc" + "wxyz"[row], row, (7, 3 - row, row + 1))
    for row in sent:
        index.finished(f"{row}")
    assert not index.blocks
    index.check()


def test_rows_to_come_that_went_elsewhere_are_not_awaited_for_ever() -> None:
    """Of four rows of each document the last one never comes."""
    index = ReuseIndex()
    for row in (row for row in range(400) if row % 4 < 3):
        text = chr(256 + row // 4) + "bc" + "wxy"[row % 4]
        announce(index, text, row, (row // 4, 3 - row % 4, row + 1))
        index.finished(f"{row}")
        index.check()
    assert 0 < len(index.blocks) <= 5 * 3


def test_rows_of_another_job_make_no_row_overdue() -> None:
    index = ReuseIndex()
    announce(index, "abx", 1, (7, 95, 2))
    for row in range(100):
        index.announce(f"other-{row}", row_hint(row, row, job="other"), chain_of("z"), 0.0)
    index.finished("1")
    assert counts(index, "ab") == [95, 95]
    index.check()
