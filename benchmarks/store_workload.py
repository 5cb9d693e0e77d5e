"""A job and its results for the benchmark `store`: chat completions of prose, all different.

They are written to files beforehand and read one by one, so that making them costs the measured
process neither time nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.samples.prose import sentence_pool
from batchrun.types import Outcome, OutcomeKind, Usage

BODY_BYTES = 1_024
POOL_SENTENCES = 20_000
BATCH_ROWS = 10_000
PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS = 220, 130, 160

JOB_FILE = """\
name: store
input:
  path: rows.parquet
  id: id
  messages:
    - {role: user, content: "{{ question }}"}
output: {path: out.parquet, keep: [question]}
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """What `write_workload` left in `folder`."""

    folder: Path
    num_rows: int

    @property
    def job_file(self) -> Path:
        """The job file."""
        return self.folder / "job.yaml"

    @property
    def bodies(self) -> Path:
        """The bodies, end to end."""
        return self.folder / "bodies.bin"

    @property
    def ends(self) -> Path:
        """Where each body ends."""
        return self.folder / "ends.npy"


def write_workload(folder: Path, num_rows: int) -> Workload:
    """Write the job file, its input and a body of about `BODY_BYTES` for every row."""
    workload = Workload(folder, num_rows)
    rng = Random(0)
    sentences = [json.dumps(text)[1:-1] for text in sentence_pool(rng, POOL_SENTENCES)]
    workload.job_file.write_text(JOB_FILE)
    ends = np.zeros(num_rows, dtype=np.int64)
    schema = pa.schema([("id", pa.string()), ("question", pa.string())])
    written_bytes = 0
    with (
        workload.bodies.open("wb") as file,
        pq.ParquetWriter(folder / "rows.parquet", schema) as questions,
    ):
        for start in range(0, num_rows, BATCH_ROWS):
            rows = range(start, min(start + BATCH_ROWS, num_rows))
            asked = [rng.choice(sentences) for _ in rows]
            questions.write_table(pa.table([[f"row-{row}" for row in rows], asked], schema=schema))
            for row in rows:
                written_bytes += file.write(_body(row, sentences, rng))
                ends[row] = written_bytes
    np.save(workload.ends, ends)
    return workload


def outcomes(workload: Workload, order: npt.NDArray[np.int64]) -> Iterator[Outcome]:
    """Every row's outcome, in `order`; body i goes to the row that comes i-th."""
    ends = np.load(workload.ends, mmap_mode="r")
    begins = 0
    with workload.bodies.open("rb") as file:
        for start in range(0, len(order), BATCH_ROWS):
            piece = slice(start, start + BATCH_ROWS)
            for row, end in zip(order[piece].tolist(), ends[piece].tolist(), strict=True):
                yield _outcome(row, file.read(end - begins))
                begins = end


def _outcome(row: int, body: bytes) -> Outcome:
    return Outcome(
        job_id="job_store",
        row=row,
        attempt=1,
        kind=OutcomeKind.OK,
        body=body,
        finish_reason="stop",
        usage=Usage(PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS),
        duration_s=1.25,
    )


def _body(row: int, sentences: list[str], rng: Random) -> bytes:
    """A chat completion as vLLM writes one."""
    head = (
        f'{{"id":"chatcmpl-{rng.getrandbits(128):032x}","object":"chat.completion","created":'
        f'{1_790_000_000 + row // 50},"model":"default","choices":[{{"index":0,"message":'
        '{"role":"assistant","content":"'
    )
    tail = (
        '","refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[],'
        '"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
        f'"usage":{{"prompt_tokens":{PROMPT_TOKENS},"total_tokens":'
        f'{PROMPT_TOKENS + OUTPUT_TOKENS},"completion_tokens":{OUTPUT_TOKENS},'
        f'"prompt_tokens_details":{{"cached_tokens":{CACHED_TOKENS}}}}}}}'
    )
    length = len(head) + len(tail)
    parts: list[str] = []
    while length < BODY_BYTES:
        parts.append(sentences[int(rng.random() * len(sentences))])
        length += len(parts[-1]) + 1
    return f"{head}{' '.join(parts)}{tail}".encode()
