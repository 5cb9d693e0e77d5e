"""Cached tokens that the gateway foretells and those that real engines return, while KV is evicted.

    python -m benchmarks.map_agreement [--minutes M] [--no-rows] [--policy NAME] [--json FILE]

Two CPU engines with the tiny model, whose KV holds a few prompts each, serve calls through the
gateway beside a job that lasts: questions about documents. The calls are conversations that send
back what was said, questions about documents of which some are asked for often (Zipf), both behind
a system prompt, and calls that share nothing; half of them are streamed. What was foretold is what
`batchrun engine explain --json` tells of each decision, what came is the reply's `usage`. A call
agrees where the two differ by no more than a piece of `PIECE_BYTES`, counted in its own tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from batchrun.samples.generators import TextSource, paragraphs
from batchrun.server.gateway.body_prompt import PIECE_BYTES, read_prompt
from benchmarks.deployment import TINY, Deployment, brought_down, scratch, wait_until
from benchmarks.records import Bar, Record, finish, markdown, parser
from benchmarks.text_jobs import DocumentSet

CONVERSATIONS, DOCUMENTS, UNSHARED = KINDS = ("conversations", "documents", "unshared")
KV_BLOCKS, BLOCK_TOKENS, KV_BYTES_PER_TOKEN = 512, 32, 1_024
NUM_CONVERSATIONS, MOST_TURNS, THINK_S = 6, 8, 8.0
OTHERS_PER_S, DOCUMENTS_SHARE = 0.5, 2 / 3
NUM_DOCUMENTS, DOCUMENT_TOKENS, SYSTEM_TOKENS = 24, (500, 3_000), (600, 600)
NUM_WORDS = 64
DOCUMENTS_A_MINUTE, ROWS_A_DOCUMENT = 400, 4
"""More rows than two cores serve: they last to the end."""
READ_S, MOST_APART_S = 5.0, 10.0
"""Decisions are read so often: 1,000 are kept. The longest way from the caller to the router."""
START_LIMIT_S, CALL_LIMIT_S = 900.0, 600.0
LEAST_AGREEMENT, MAP_MIB, MAP_MIB_AN_ENGINE = 0.85, 1.0, 0.25
EVICTED = re.compile(r"^vllm:kv_block_lifetime_seconds_count\{.*\} (\S+)$", re.M)
Json = dict[str, Any]


@dataclass(slots=True, eq=False)
class MadeCall:
    """A call that was answered, and, once `engine` is known, what was foretold of it. Instants are
    monotonic, tokens the engine's."""

    kind: str
    body: bytes
    sent_at_s: float
    ended_at_s: float
    prompt_tokens: int
    cached_tokens: int
    engine: str = ""
    foretold_tokens: float = 0.0

    @property
    def piece_tokens(self) -> float:
        """A piece, by this prompt's bytes and tokens."""
        return PIECE_BYTES * self.prompt_tokens / max(1, read_prompt(self.body).num_bytes)

    @property
    def off_tokens(self) -> float:
        """What came beyond what was foretold."""
        return self.cached_tokens - self.foretold_tokens


@dataclass(slots=True)
class Traffic:
    """Sends calls to `url` until `end_s`; those answered are in `made`. Answers are of `words`,
    tokens that a tokenizer makes of their text again, as it does of a real model's answers."""

    url: str
    words: list[int]
    end_s: float
    rng: Random
    made: list[MadeCall] = field(default_factory=list)
    num_failed: int = 0
    _texts: TextSource = field(default_factory=lambda: TextSource(0))

    async def run(self) -> None:
        """All kinds at once, until the last call has ended."""
        documents = [self._text(*DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
        shares = [1 / rank for rank in range(1, NUM_DOCUMENTS + 1)]
        system = {"role": "system", "content": self._text(*SYSTEM_TOKENS)}
        timeout = aiohttp.ClientTimeout(CALL_LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _ in range(NUM_CONVERSATIONS):
                group.create_task(self._converse(session, system))
            while await self._goes_on_after(1 / OTHERS_PER_S):
                kind, said = UNSHARED, [{"role": "user", "content": self._text(100, 1_500)}]
                if self.rng.random() < DOCUMENTS_SHARE:
                    (document,) = self.rng.choices(documents, shares)
                    question = f"{document}\n\nQuestion: {self._text(10, 40)}"
                    kind, said = DOCUMENTS, [system, {"role": "user", "content": question}]
                group.create_task(self._call(session, kind, said, self.rng.randint(8, 48)))

    async def _converse(self, session: aiohttp.ClientSession, system: Json) -> None:
        """One conversation after the other."""
        while True:
            said = [system]
            for _ in range(self.rng.randint(2, MOST_TURNS)):
                if not await self._goes_on_after(THINK_S):
                    return
                said.append({"role": "user", "content": self._text(20, 400)})
                num_tokens = self.rng.randint(16, 200)
                answer = await self._call(session, CONVERSATIONS, said, num_tokens)
                said.append({"role": "assistant", "content": answer})

    async def _goes_on_after(self, mean_s: float) -> bool:
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))
        return time.monotonic() < self.end_s

    def _text(self, least_tokens: int, most_tokens: int) -> str:
        num_tokens = self.rng.uniform(least_tokens, most_tokens)
        return paragraphs(self._texts.sentences(self.rng, num_tokens))

    async def _call(
        self, session: aiohttp.ClientSession, kind: str, said: Sequence[Json], max_tokens: int
    ) -> str:
        """The text of the answer."""
        document: Json = {"model": TINY, "messages": said, "max_tokens": max_tokens}
        document |= {"ignore_eos": True, "allowed_token_ids": self.words}
        if is_stream := self.rng.random() < 0.5:
            document |= {"stream": True, "stream_options": {"include_usage": True}}
        body, sent_at_s = json.dumps(document).encode(), time.monotonic()
        try:
            async with session.post(self.url, json=document) as reply:
                reply.raise_for_status()
                text, usage = _read_reply(await reply.text(), is_stream=is_stream)
        except (aiohttp.ClientError, TimeoutError):
            self.num_failed += 1
            return "no answer"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told = (time.monotonic(), usage["prompt_tokens"], cached)
        self.made.append(MadeCall(kind, body, sent_at_s, *told))
        return text


def _read_reply(text: str, *, is_stream: bool) -> tuple[str, Json]:
    """The text of an answer, and its `usage`."""
    if not is_stream:
        document = json.loads(text)
        return document["choices"][0]["message"]["content"], document["usage"]
    lines = text.splitlines()
    events = [json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(each["delta"].get("content") or "" for each in choices), events[-1]["usage"]


def find_foretold(made: Sequence[MadeCall], told: Json, read_at_s: float) -> None:
    """Fill in what was foretold of calls whose decisions are among those that were `told` then.

    A decision is a call's where it tells of the same tokens and was made when the call was sent.
    """
    by_tokens = defaultdict(list)
    for each in told["decisions"]:
        by_tokens[each["told_prompt_tokens"], each["told_cached_tokens"]].append(each)
    for call in (call for call in made if not call.engine):
        age_s = read_at_s - call.sent_at_s
        found = by_tokens[call.prompt_tokens, call.cached_tokens]
        decision = min(found, key=lambda each: abs(each["age_s"] - age_s), default=None)
        if decision is not None and abs(decision["age_s"] - age_s) <= MOST_APART_S:
            ratio = call.prompt_tokens / decision["prompt_tokens"]
            call.engine = decision["chosen"]["engine"]
            call.foretold_tokens = (decision["chosen"]["cached_tokens"] or 0.0) * ratio


def judge(calls: Sequence[MadeCall]) -> Record:
    """How what was foretold of these calls agrees with what came."""
    if not calls:
        return {"num_calls": 0}
    prompt_tokens = sum(call.prompt_tokens for call in calls)
    return {
        "num_calls": len(calls),
        "agreement": fmean(abs(call.off_tokens) <= call.piece_tokens for call in calls),
        "too_much_share": fmean(call.off_tokens < -call.piece_tokens for call in calls),
        "too_little_share": fmean(call.off_tokens > call.piece_tokens for call in calls),
        "off_mean_tokens": fmean(abs(call.off_tokens) for call in calls),
        "bias_mean_tokens": fmean(call.off_tokens for call in calls),
        "piece_mean_tokens": fmean(call.piece_tokens for call in calls),
        "hit_rate_foretold": sum(call.foretold_tokens for call in calls) / prompt_tokens,
        "hit_rate_returned": sum(call.cached_tokens for call in calls) / prompt_tokens,
    }


def start(deployment: Deployment, policy: str) -> None:
    """Returns when both engines are ready."""
    options = [f"--kv-cache-memory-bytes={KV_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN}"]
    options += [f"--block-size={BLOCK_TOKENS}", "--max-model-len=8192"]
    options += ["--kv-cache-metrics", "--kv-cache-metrics-sample=1"]
    deployment.use_vllm_engines(2, *options, policy=policy)
    deployment.start()
    wait_until(lambda: len(deployment.engine_metrics()) == 2, "two engines", START_LIMIT_S)


async def run(deployment: Deployment, options: Namespace) -> tuple[list[MadeCall], Record]:
    """Calls beside rows: those calls of which something was foretold, and figures of the whole."""
    num_documents = round(options.minutes * DOCUMENTS_A_MINUTE) + 1
    rows = DocumentSet(num_documents, (1_000, 2_000), ROWS_A_DOCUMENT).job("rows")
    job_id = None if options.no_rows else deployment.submit(rows.write(deployment.folder))
    url, end_s = f"{deployment.url}/v1/chat/completions", time.monotonic() + 60 * options.minutes
    traffic = Traffic(url, known_words(deployment), end_s, Random(options.seed))
    sending = asyncio.create_task(traffic.run())
    while not sending.done():
        await asyncio.wait([sending], timeout=READ_S)
        told = await asyncio.to_thread(deployment.client.get, "/routing")
        find_foretold(traffic.made, told, time.monotonic())
    await sending
    job = deployment.job(job_id) if job_id else {"num_completed": 0, "num_rows": 0}
    found = [call for call in traffic.made if call.engine]
    return found, {
        "num_failed": traffic.num_failed,
        "num_without_decision": len(traffic.made) - len(found),
        "num_rows_done": job["num_completed"],
        "num_rows_left": job["num_rows"] - job["num_completed"],
        **deployment.book_bytes(),
    }


def known_words(deployment: Deployment) -> list[int]:
    """Tokens that are words with a blank before them."""
    tokenizer = Tokenizer.from_file(str(deployment.home.models / TINY / "tokenizer.json"))
    words = [f" {text[1:]}" for text in sorted(tokenizer.get_vocab()) if text[1:].isalpha()]
    encoded = [tokenizer.encode(word).ids for word in words]
    return [ids[0] for ids in encoded if len(ids) == 1][:NUM_WORDS]


def by_part(calls: Sequence[MadeCall], pages: Mapping[str, str]) -> Iterator[Record]:
    """By kind, and by engine with how often a KV block was given to something else."""
    for kind in KINDS:
        yield {"calls": kind, **judge([call for call in calls if call.kind == kind])}
    for name, page in pages.items():
        its = judge([call for call in calls if call.engine == name])
        blocks = {"num_evicted_blocks": sum(map(float, EVICTED.findall(page)))}
        yield {"calls": f"engine {name}", **its, **blocks, "num_kv_blocks": KV_BLOCKS}


def table(records: Sequence[Record]) -> str:
    """What the records tell, by kind of call and by engine."""
    columns = [*records[0]][1:10]
    header = ["", *(name.replace("_", " ") for name in columns)]
    return markdown(header, [[each["calls"], *map(each.get, columns)] for each in records])


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What must hold, and the signs that it was put to the test."""
    whole = records[0]
    yield Bar("calls whose cached tokens were foretold", whole["agreement"], LEAST_AGREEMENT)
    yield Bar("calls that failed", whole["num_failed"], 0, is_most=True)
    engines = [each for each in records if "num_evicted_blocks" in each]
    for each in engines:
        turnover = each["num_evicted_blocks"] / each["num_kv_blocks"]
        yield Bar(f"{each['calls']}: its KV evicted, times", turnover, 1.0)
    if whole["num_rows_done"] + whole["num_rows_left"]:
        yield Bar("offline rows done", whole["num_rows_done"], whole["num_calls"])
        yield Bar("offline rows that were left", whole["num_rows_left"], 1.0)
    most_mib = MAP_MIB + MAP_MIB_AN_ENGINE * len(engines)
    yield Bar("the map, MiB", whole["map_resident_bytes"] / 2**20, most_mib, is_most=True)
    yield Bar("the map of as many engines as it takes, MiB", whole["map_bytes"] / 2**20)


def main() -> int:
    """Measure, print, save; exit code 1 when a bar is missed, 4 when an engine is lost."""
    options = parser(__doc__, minutes=5.0, seed=0, policy="echo", no_rows=False).parse_args()
    with scratch("map_agreement") as folder, brought_down(Deployment(folder)) as deployment:
        start(deployment, options.policy)
        calls, whole = asyncio.run(run(deployment, options))
        parts = by_part(calls, deployment.engine_metrics())
        records: list[Record] = [{"calls": "all", **judge(calls), **whole}, *parts]
    print(table(records), flush=True)
    return finish(options.json, records, bars(records))


if __name__ == "__main__":
    raise SystemExit(main())
