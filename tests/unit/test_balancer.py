"""Which engine the gateway sends a call to, and what its workers know of each other's calls."""

from __future__ import annotations

import asyncio
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from batchrun.hints import SloBounds
from batchrun.routing.engine_book import EngineTraits
from batchrun.server.gateway.balancer import COOLDOWN_S, Balancer, RoutedCall
from batchrun.server.gateway.body_prompt import PIECE_BYTES, read_prompt
from batchrun.server.gateway.replies import ReplyUsage
from batchrun.server.gateway.shared_book import (
    FAILURES,
    FIRST_EJECTION_S,
    LONGEST_EJECTION_S,
    MAX_ENGINES,
    SharedBook,
    create,
)
from batchrun.server.gateway.upstreams import CallTimeouts, Upstream

ONE, TWO = Upstream("one", "http://h:1"), Upstream("two", "http://h:2")


@pytest.fixture
def book() -> Iterator[int]:
    fd = create(2)
    yield fd
    os.close(fd)


def worker(book: int, number: int = 0, router: str = "least") -> Balancer:
    balancer = Balancer(SharedBook(book, 2, number))
    balancer.replace([ONE, TWO], router)
    return balancer


def chat(text: str, **others: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"content": text}], **others}).encode()


def streamed(balancer: Balancer, text: str = "hello") -> RoutedCall:
    return balancer.read(chat(text, stream=True))


def serve(balancer: Balancer, upstream: Upstream, text: str) -> None:
    """A call whose reply has begun."""
    call = streamed(balancer, text)
    with balancer.sending(upstream, call):
        call.usage.feed(b"data: x\n\n")


def test_the_engine_with_the_fewest_calls_in_flight_comes_first(book: int) -> None:
    balancer = worker(book)
    call = streamed(balancer)
    with balancer.sending(ONE, call):
        assert balancer.candidates(call, now_s=1) == [TWO, ONE]
        with balancer.sending(TWO, call), balancer.sending(TWO, call):
            assert balancer.candidates(call, now_s=1) == [ONE, TWO]


def test_an_engine_that_refused_comes_last_until_it_has_cooled_down(book: int) -> None:
    balancer = worker(book)
    call = streamed(balancer)
    balancer.mark_down(ONE, now_s=10, found=0)
    assert balancer.candidates(call, now_s=10) == [TWO, ONE]
    assert balancer.candidates(call, now_s=10 + COOLDOWN_S) == [ONE, TWO]


def test_an_engine_whose_calls_fail_gets_one_after_a_growing_while(book: int) -> None:
    first, second = worker(book), worker(book, 1)
    call = streamed(first)
    for _ in range(FAILURES):
        assert ONE in second.candidates(call, now_s=10)
        first.failed(ONE, now_s=10)
    now_s, left_s = 10.0, FIRST_EJECTION_S
    for _ in range(8):
        assert second.candidates(call, now_s=now_s) == [TWO]
        assert second.ejected(now_s=now_s)[0][1] == left_s
        now_s, left_s = now_s + left_s, min(2 * left_s, LONGEST_EJECTION_S)
        assert second.take_turn(ONE, now_s=now_s)
        assert not first.take_turn(ONE, now_s=now_s)
        second.failed(ONE, now_s=now_s)
    now_s += left_s
    assert first.take_turn(ONE, now_s=now_s)
    first.answered(ONE)
    assert second.take_turn(ONE, now_s=now_s) and second.take_turn(ONE, now_s=now_s)
    assert second.ejected(now_s=now_s) == [("one", 0.0, 9), ("two", 0.0, 0)]


def test_calls_that_were_sent_before_an_ejection_make_it_no_longer(book: int) -> None:
    balancer = worker(book)
    found = balancer.num_ejections_in_a_row(ONE)
    for _ in range(100):
        balancer.failed(ONE, now_s=10, found=found)
    assert balancer.ejected(now_s=10)[0] == ("one", FIRST_EJECTION_S, 1)


@pytest.mark.parametrize("again", [replace(ONE, started=1), ONE])
def test_an_engine_that_is_ready_again_gets_calls_at_once(book: int, again: Upstream) -> None:
    balancer = worker(book)
    for _ in range(FAILURES):
        balancer.failed(ONE, now_s=10)
    balancer.replace([replace(ONE, is_ready=False), TWO], "least")
    assert balancer.candidates(streamed(balancer), now_s=10) == [TWO]
    balancer.replace([again, TWO], "least")
    assert ONE in balancer.candidates(streamed(balancer), now_s=10)


@pytest.mark.parametrize("is_seen_away", [True, False])
def test_an_engine_started_anew_comes_before_the_last_choice_at_once(
    book: int, *, is_seen_away: bool
) -> None:
    balancer = worker(book)
    balancer.mark_down(ONE, now_s=10, found=0)
    if is_seen_away:
        balancer.replace([replace(ONE, is_ready=False), TWO], "least")
    balancer.replace([replace(ONE, started=1), replace(TWO, is_last_choice=True)], "least")
    assert balancer.candidates(streamed(balancer), now_s=11) == [ONE, TWO]


@pytest.mark.parametrize("body", [chat("hello", stream=True), b"{"])
async def test_a_call_on_trial_that_proves_nothing_leaves_its_turn(book: int, body: bytes) -> None:
    balancer = worker(book)
    for _ in range(FAILURES):
        balancer.failed(ONE, now_s=time.monotonic() - FIRST_EJECTION_S)
    call = balancer.read(body)
    for _ in range(3):
        now_s = time.monotonic()
        assert balancer.take_turn(ONE, now_s=now_s)
        with balancer.sending(ONE, call):
            assert not balancer.take_turn(ONE, now_s=now_s)
    now_s = time.monotonic()
    assert balancer.take_turn(ONE, now_s=now_s)
    with balancer.sending(ONE, call):
        balancer.failed(ONE, now_s=now_s)
    assert not balancer.take_turn(ONE, now_s=now_s)


def test_long_names_of_models_are_not_kept(book: int) -> None:
    balancer = worker(book)
    balancer.candidates(balancer.read(chat("a")), now_s=1)
    tracemalloc.start()
    try:
        for number in range(64):
            name = f"{number}-" + "x" * 100_000
            assert balancer.is_served(balancer.read(chat("a", model=name)))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [b'{"model":"\xff"}', b'{"model":1e999}', b'{"model":"\\ud800"}'])
def test_a_model_that_is_no_text_is_none(body: bytes) -> None:
    assert read_prompt(body).model in {None, "\ufffd"}


def test_counts_survive_a_new_list(book: int) -> None:
    balancer = worker(book)
    call = streamed(balancer)
    balancer.replace([ONE], "least")
    with balancer.sending(ONE, call):
        balancer.replace([ONE, TWO], "least")
        assert balancer.candidates(call, now_s=1) == [TWO, ONE]
        balancer.replace([])
    assert balancer.candidates(call, now_s=1) == []


def test_workers_know_of_each_others_calls_until_one_is_replaced(book: int) -> None:
    first, second = worker(book), worker(book, 1)
    call = streamed(first)
    with first.sending(ONE, call), first.sending(ONE, call):
        assert second.candidates(call, now_s=1) == [TWO, ONE]
    with second.sending(TWO, call):
        assert first.candidates(call, now_s=1) == [ONE, TWO]
        # The worker was killed: the next of its number begins with nothing.
        SharedBook(book, 2, 1)
        with first.sending(ONE, call):
            assert first.candidates(call, now_s=1) == [TWO, ONE]


def test_a_prompt_goes_where_any_worker_sent_its_beginning(book: int) -> None:
    first, second = worker(book, router="cost"), worker(book, 1, "cost")
    text = "x" * 40_000
    serve(first, TWO, text)
    assert second.candidates(streamed(second, text + "?"), now_s=1e9)[0] is TWO
    assert second.candidates(streamed(second, "y" * 40_000), now_s=1e9)[0] is ONE


def test_an_engine_that_started_anew_holds_nothing(book: int) -> None:
    balancer = worker(book, router="cost")
    text = "x" * 40_000
    serve(balancer, TWO, text)
    again = Upstream("two", "http://h:2", started=1)
    balancer.replace([ONE, again], "cost")
    assert balancer.candidates(streamed(balancer, text), now_s=1e9)[0] is ONE


def test_two_engines_of_one_name_are_two(book: int) -> None:
    balancer = worker(book)
    again = Upstream("one", "http://h:9")
    balancer.replace([ONE, again], "least")
    call = streamed(balancer)
    assert balancer.candidates(call, now_s=1) == [ONE, again]
    with balancer.sending(ONE, call):
        assert balancer.candidates(call, now_s=1) == [again, ONE]


def test_engines_beyond_what_can_be_known_come_last(book: int) -> None:
    many = [Upstream(f"e{i}", f"http://h:{i}") for i in range(MAX_ENGINES + 2)]
    balancer = worker(book)
    balancer.replace(many, "least")
    call = streamed(balancer)
    order = balancer.candidates(call, now_s=1)
    assert sorted(order, key=many.index) == many
    with balancer.sending(order[-1], call):
        assert balancer.candidates(call, now_s=1)[-2:] == order[-2:]


async def test_a_call_without_a_stream_waits_no_longer_than_its_prompt_takes(book: int) -> None:
    shared = SharedBook(book, 2, 0)
    balancer = Balancer(shared)
    balancer.replace([ONE], "cost")
    call = balancer.read(chat("x" * 400))
    with balancer.sending(ONE, call):
        (column,) = shared.columns_of([("one", 0)]).values()
        assert shared.book.loads([column], 1.0)[column].waiting_calls == 1
        while shared.book.loads([column], 1.0)[column].waiting_calls:
            await asyncio.sleep(0.01)
        assert shared.book.loads([column], 1.0)[column].calls == 1


@pytest.mark.parametrize(("nonce", "num_waiting"), [("secret", 0), (None, 1)])
def test_a_flex_call_that_gives_way_is_in_nobodys_line(
    book: int, nonce: str | None, num_waiting: int
) -> None:
    shared, engine = SharedBook(book, 2, 0), replace(ONE, hint_nonce=nonce)
    balancer = Balancer(shared)
    balancer.replace([engine], "cost")
    (column,) = shared.columns_of([("one", 0)]).values()
    call = balancer.read(chat("hello", stream=True), is_offline=True)
    with balancer.sending(engine, call):
        load = shared.book.loads([column], 1.0)[column]
        assert (load.calls, load.waiting_calls) == (1, num_waiting)
        assert (load.waiting_tokens > 0) == (num_waiting > 0)
        call.usage.feed(b"data: x\n\n")
    load = shared.book.loads([column], 1.0)[column]
    assert (load.calls, load.waiting_calls, load.waiting_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("others", "num"),
    [
        ({}, 1),
        ({"n": 8}, 8),
        ({"n": "8"}, 0),
        ({"n": 8, "input": "of a response"}, 0),
        ({"prompt": ['"], [']}, 1),
        ({"prompt": ["a", "b"]}, 0),
        ({"prompt": [1, 2]}, 1),
        ({"prompt": [[1, 2], [3]]}, 0),
    ],
)
def test_the_choices_of_a_reply_are_counted_where_that_can_be(
    others: dict[str, object], num: int
) -> None:
    assert read_prompt(chat("hi", **others)).num_choices == num


@pytest.mark.parametrize(
    "others", [{"stream_interval": 10**6}, {"include_reasoning": False}, {"tools": [{"type": "x"}]}]
)
def test_a_stream_of_few_pieces_is_waited_for_as_an_answer_is(
    book: int, others: dict[str, object]
) -> None:
    text = worker(book).read(chat("hi", stream=True, **others)).text
    waits_s = CallTimeouts().of(is_stream=True, may_pause=text.may_pause, is_offline=False)
    assert waits_s == (300.0, 3_600.0)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({}, (False, False)),
        ({"tools": []}, (False, False)),
        ({"tools": [{}]}, (False, True)),
        ({"stream_interval": 5}, (True, True)),
        ({"include_reasoning": False}, (True, True)),
    ],
)
def test_what_may_pause_is_known_of_a_body_that_is_no_strict_json(
    others: dict[str, object], told: tuple[bool, bool]
) -> None:
    body = chat("hi", odd=float("nan"), stream=True, **others)
    text = read_prompt(body, needs_model=True)
    assert (text.is_sparse, text.may_pause) == told
    assert read_prompt(body).may_pause


@pytest.mark.parametrize("tools", [None, []])
def test_a_stream_without_tools_comes_token_by_token(tools: object) -> None:
    assert not read_prompt(chat("hi", stream=True, tools=tools)).may_pause


def test_a_stream_with_tools_that_answers_in_words_has_a_pace(book: int) -> None:
    usage = worker(book).read(chat("hi", stream=True, tools=[{"type": "x"}])).usage
    for _ in range(3):
        usage.feed(b'data: {"choices": [{"delta": {"content": "w"}}]}\n\n')
    assert usage.tpot_s is not None


def test_prompts_that_begin_alike_have_keys_that_begin_alike() -> None:
    text = "word " * 1_000
    short, long = read_prompt(chat(text)), read_prompt(chat(text + "and more " * 1_000))
    whole = len(text) // PIECE_BYTES
    assert short.keys[:whole].tolist() == long.keys[:whole].tolist()
    assert not set(short.keys[whole:].tolist()) & set(long.keys.tolist())
    assert len(set(long.keys.tolist())) == len(long.keys)


@pytest.mark.parametrize("others", [{"model": "other"}, {"cache_salt": "s"}, {"tools": [{"a": 1}]}])
def test_what_separates_caches_separates_keys(others: dict[str, object]) -> None:
    plain = read_prompt(chat("x" * 9_000)).keys.tolist()
    apart = read_prompt(chat("x" * 9_000, **others)).keys.tolist()
    assert apart
    assert not set(plain) & set(apart)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": }', b"\xff\xfe", b"[" * 99_999])
def test_what_is_no_body_has_no_keys(body: bytes) -> None:
    prompt = read_prompt(body)
    assert (prompt.num_bytes, len(prompt.keys), prompt.is_stream) == (0, 0, False)


def test_calls_go_to_engines_that_serve_their_model_or_may(book: int) -> None:
    small = Upstream("small", "http://small", models=("s", "adapter"))
    large = Upstream("large", "http://large", models=("m",))
    silent = Upstream("silent", "http://silent")
    balancer = Balancer(SharedBook(book, 2, 0))

    balancer.replace([small, large])
    assert balancer.candidates(balancer.read(chat("hi")), now_s=1) == [large]
    adapted = balancer.read(chat("hi", model="adapter"))
    assert balancer.candidates(adapted, now_s=1) == [small]
    unknown = balancer.read(chat("hi", model="x"))
    assert not balancer.is_served(unknown)
    assert set(balancer.candidates(balancer.read(b"{}"), now_s=1)) == {small, large}

    balancer.replace([small, silent])
    assert balancer.candidates(unknown, now_s=1) == [silent]
    balancer.replace([small])
    assert balancer.candidates(unknown, now_s=1) == [small]


@pytest.mark.parametrize("odd", ['"\\ud83d' + "x" * 200_000 + '"', "NaN", '"\ufeff"'])
def test_a_body_that_only_engines_read_goes_to_one_of_its_model(book: int, odd: str) -> None:
    engines = [Upstream(name, f"http://{name}", models=(name,)) for name in ("s", "l")]
    balancer = Balancer(SharedBook(book, 2, 0))
    balancer.replace(engines)
    for each in engines:
        body = f'{{"user": {odd}, "stream": true, "model": "{each.name}"}}'
        call = balancer.read(body.encode("utf-16" if "\ufeff" in odd else "utf-8"))
        assert (balancer.candidates(call, now_s=1), call.text.is_stream) == ([each], True)


def test_an_engine_that_is_gone_comes_last_and_one_that_is_not_known_does_not(book: int) -> None:
    balancer = worker(book)
    call = streamed(balancer)
    with balancer.sending(TWO, call):
        balancer.replace([replace(ONE, is_ready=False, is_gone=True), TWO], "least")
        assert balancer.candidates(call, now_s=1) == [TWO, ONE]
        balancer.replace([replace(ONE, is_ready=False), TWO], "least")
        assert balancer.candidates(call, now_s=1) == [ONE, TWO]


def test_a_daemon_that_does_not_know_yet_when_engines_began_forgets_no_prompt(book: int) -> None:
    balancer = worker(book, router="cost")
    began = replace(TWO, started=7)
    balancer.replace([ONE, began], "cost")
    text = "x" * 40_000
    serve(balancer, began, text)
    for started in (0, 7):
        balancer.replace([ONE, replace(TWO, started=started)], "cost")
        assert balancer.candidates(streamed(balancer, text), now_s=1e9)[0] == TWO


@pytest.mark.parametrize("two", [replace(TWO, is_last_choice=True), replace(TWO, is_gone=True)])
def test_a_call_that_would_be_late_goes_to_no_engine_that_is_to_get_none(
    book: int, two: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(ReplyUsage, "now_s", staticmethod(lambda: now_s))
    balancer = worker(book)
    balancer.refuse_late(is_on=True)
    balancer.replace([ONE, two], "least")

    def promised(text: str, ttft_s: float, value: float = 1.0) -> RoutedCall:
        call = streamed(balancer, text)
        call.slo = SloBounds(ttft_s, 0.1, None, value)
        return call

    with balancer.sending(ONE, promised("y" * 400_000, 1e6, value=2.0)):
        for _ in range(20):
            behind = promised("hello", 60.0)
            with balancer.sending(ONE, behind):
                now_s += 5.0
                behind.usage.feed(b"x")
        call = promised("hello", 1.0)
        candidates = balancer.candidates(call, now_s=now_s)
        order, late_s = balancer.in_time(candidates, call, now_s=now_s)

    assert order == candidates == [ONE, TWO]
    assert late_s == pytest.approx(4.0, rel=0.1)


def test_cached_tokens_are_compared_in_one_measure(book: int) -> None:
    balancer = worker(book, router="cost")
    text = "x" * 40_000
    for _ in range(60):
        call = streamed(balancer, text)
        with balancer.sending(TWO, call):
            call.usage.prompt_tokens, call.usage.cached_tokens = 5_000, 4_900
            call.usage.output_tokens = 3
    (figures,) = [each for each in balancer.figures() if each.engine == "two"]

    assert figures.agreement is not None and figures.agreement > 0.9
    assert figures.num_pieces > 30


async def test_what_asks_for_a_list_is_no_call_of_the_last(book: int) -> None:
    balancer = worker(book)
    serve(balancer, ONE, "hello")
    with balancer.sending(ONE, balancer.read(None)):
        pass
    assert [each.num_calls for each in balancer.figures()] == [1, 0]


def test_streams_that_tell_of_no_tokens_are_counted_by_their_events(book: int) -> None:
    shared = SharedBook(book, 2, 0)
    balancer = Balancer(shared)
    balancer.replace([ONE, TWO], "cost")
    for _ in range(300):
        call = streamed(balancer)
        with balancer.sending(ONE, call):
            for _ in range(21):
                call.usage.feed(b"data: x\n\n")
    assert shared.book.answer_tokens == pytest.approx(20.0)


def test_a_ranking_makes_no_memory_of_engines_that_are_not_there(book: int) -> None:
    balancer = worker(book, router="cost")
    for number in range(200):
        for _ in range(2):
            call = streamed(balancer, f"{number} " * 8_000)
            balancer.candidates(call, now_s=time.monotonic())
            with balancer.sending(ONE, call):
                pass
    assert os.fstat(book).st_blocks * 512 < 16 << 20


def test_a_prompt_beyond_every_engine_weighs_what_the_largest_can_hold(book: int) -> None:
    balancer = worker(book)
    small = replace(TWO, traits=EngineTraits(kv_tokens=10_000))
    balancer.replace([small, replace(ONE, traits=EngineTraits(kv_tokens=20_000))], "cost")
    assert balancer.read(chat("x" * 2_000_000)).call.prompt_tokens == 20_000
    balancer.replace([small], "cost")
    assert balancer.read(chat("x" * 2_000_000)).call.prompt_tokens == 10_000


@pytest.mark.parametrize("odd", ["half an emoji \\ud83d", "\\udc00 the other half", "\ufeff"])
def test_what_engines_read_and_strict_readers_do_not_still_has_its_model(odd: str) -> None:
    begin, text = ("\ufeff", "") if odd == "\ufeff" else ("", odd)
    body = begin + '{"model": "m", "stream": true, "messages": [{"content": "' + text + '"}]}'
    prompt = read_prompt(body.encode())
    assert (prompt.model, prompt.is_stream) == ("m", True)
    long = body.replace('"content": "', '"content": "' + "x" * 9_000)
    usual = long.removeprefix("\ufeff").replace(text or "no such", "usual")
    assert read_prompt(long.encode()).keys.tolist() == read_prompt(usual.encode()).keys.tolist()


def test_an_image_is_no_text_of_its_size(book: int) -> None:
    def body(image: str, question: str = "what is it?") -> bytes:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        text = {"type": "text", "text": question}
        return json.dumps({"model": "m", "messages": [{"content": [url, text]}]}).encode()

    one, same, other = body("A" * 10**6), body("A" * 10**6, "and now?"), body("B" * 10**6)
    seen, again, another = read_prompt(one), read_prompt(same), read_prompt(other)
    short = read_prompt(body("A" * 20))

    assert seen.has_media and seen.num_bytes < 5_000
    assert list(seen.keys[:3]) == list(again.keys[:3])
    assert seen.keys[0] != another.keys[0]
    assert short.num_bytes < 200
    balancer = worker(book)
    assert balancer.read(one).call.prompt_tokens < 2_000
    assert read_prompt(one.replace(b"image/", rb"image\/")).num_bytes < 5_000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "/+Aa" * 10**5, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{'Q' * 10**6}"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/ogg;base64,{'Q' * 10**6}"}},
    ],
)
def test_sounds_and_videos_are_no_text_of_their_size(part: dict[str, object]) -> None:
    seen = read_prompt(json.dumps({"model": "m", "messages": [{"content": [part]}]}).encode())

    assert seen.has_media and seen.num_bytes < 5_000


def test_a_long_text_is_no_medium() -> None:
    text = {"type": "text", "text": 'my "data": "' + "A" * 9_000}
    seen = read_prompt(json.dumps({"model": "m", "messages": [{"content": [text]}]}).encode())

    assert not seen.has_media and seen.num_bytes > 9_000


def test_an_engine_goes_by_its_name_whether_reached_itself_or_through_its_agent(book: int) -> None:
    balancer = worker(book, router="cost")
    body = chat("x" * 9_000, stream=True)
    serve(balancer, ONE, "x" * 9_000)
    balancer.replace([replace(ONE, models=("m",)), TWO], "cost")

    balancer.replace([replace(ONE, url="https://agent:1", models=None), TWO], "cost")

    agent, _ = balancer.upstreams
    assert agent.models == ("m",)
    assert balancer.candidates(balancer.read(body), now_s=time.monotonic())[0] is agent
    assert balancer.figures()[0].num_pieces


def test_a_call_that_outlives_its_engine_teaches_nothing_of_the_next(book: int) -> None:
    shared = SharedBook(book, 2, 0)
    balancer = Balancer(shared)
    balancer.replace([replace(ONE, started=1)], "cost")
    body = chat("x" * 40_000, stream=True)
    for _ in range(2):
        first = balancer.read(body)
        with balancer.sending(balancer.upstreams[0], first):
            first.usage.prompt_tokens, first.usage.cached_tokens = 10_000, 9_999
            first.usage.output_tokens = 9
    late = balancer.read(body)
    with balancer.sending(balancer.upstreams[0], late):
        late.usage.prompt_tokens, late.usage.cached_tokens = 10_000, 0
        late.usage.output_tokens = 9
        balancer.replace([replace(ONE, started=2)], "cost")
        serve(balancer, balancer.upstreams[0], "x" * 40_000)
        before = balancer.figures()[0].num_pieces
        answers = shared.book.answer_tokens
    assert before == 39
    assert (balancer.figures()[0].num_pieces, shared.book.answer_tokens) == (before, answers)


def test_columns_that_were_never_used_are_taken_before_those_of_engines_that_left(
    book: int,
) -> None:
    shared = SharedBook(book, 2, 0)
    before = shared.columns_of([("a", 1), ("b", 1)])

    after = shared.columns_of([("b", 1), ("c", 1)])

    assert after["b"] == before["b"]
    assert after["c"] not in before.values()


@pytest.mark.parametrize("others", [{"echo": True}, {"prompt_logprobs": 0}])
def test_a_prompt_whose_tokens_are_asked_for_tells_nothing_of_the_cache(
    book: int, others: dict[str, object]
) -> None:
    balancer = worker(book, router="cost")
    bodies = [chat("x" * 40_000, stream=True, **more) for more in ({}, others, others)]
    for number, body in enumerate(bodies):
        call = balancer.read(body)
        with balancer.sending(ONE, call):
            call.usage.feed(b"data: x\n\n")
            call.usage.prompt_tokens, call.usage.output_tokens = 10_000, 9
            call.usage.cached_tokens = 0
        assert read_prompt(body).tells_of_cache == (number == 0)

    now_s = time.monotonic() + 1_000
    assert balancer.candidates(balancer.read(bodies[0]), now_s=now_s)[0] is ONE
    assert (
        balancer.read(bodies[0]).call.keys.tolist() == balancer.read(bodies[1]).call.keys.tolist()
    )
