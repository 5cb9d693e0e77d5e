"""What `batchrun inspect` estimates of a job's prompts, against a direct count with a tokenizer.

    python -m benchmarks.inspect_agreement [--datasets NAME ...] [--tokenizer FILE] [--data FOLDER]
        [--video-tokens N] [--rows N] [--json FILE]

The real ToolBench, LooGLE and NExT-QA files are imported as `batchrun datasets import` does, and
studied through the shipped job files with the tiny model's chat template. The direct count
tokenises every prompt and finds every shared prefix on the token ids, in plain Python. Ends with
exit code 1 when a mean is off by more than 3 %.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from batchrun.engine.tiny_model import build_tiny_model
from batchrun.jobs.figures import Inspected
from batchrun.jobs.inputs.data import InputData, open_input
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.tokens import PromptReader, read_prompts, token_counter
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import KvSize, estimate_outputs, study_job
from batchrun.samples.importers import import_dataset
from benchmarks.records import write_records

TokenIds = npt.NDArray[np.uint32]


class Node(NamedTuple):
    """A prefix of two rows or more, or what one row has for itself: its own tokens, the rows that
    have it, and the first of them."""

    tokens: int
    num_rows: int
    first_row: int


def direct_figures(prompts: Sequence[TokenIds]) -> dict[str, float]:
    """Means and deviations as `batchrun inspect --json` names them."""
    lengths, shared, common, keys = [], [], [], []
    rows_per_key: dict[Node, int] = {}
    for row, path in prefix_paths(prompts):
        length = sum(node.tokens for node in path)
        key = key_portion(path)
        rows_per_key[key] = key.num_rows
        lengths.append(length)
        shared.append(sum(node.tokens for node in path if node.first_row < row))
        common.append(sum(node.tokens for node in path if node.num_rows > 1))
        keys.append(key.tokens)
    total = np.array(lengths)
    figures = {
        "prompt_tokens": total,
        "shared_share": np.array(shared) / total,
        "common_share": np.array(common) / total,
        "key_portion_share": np.array(keys) / total,
        "rows_per_key_portion": np.array(list(rows_per_key.values())),
    }
    means = {f"{name}_mean": float(values.mean()) for name, values in figures.items()}
    stds = {f"{name}_std": float(values.std()) for name, values in figures.items()}
    return means | stds | {"shared_share_of_tokens": sum(shared) / sum(lengths)}


def key_portion(path: Sequence[Node]) -> Node:
    """ "The deepest node in a path that has more tokens than the sum of its predecessors"."""
    before, key = 0, path[0]
    for node in path:
        if node.tokens > before:
            key = node
        before += node.tokens
    return key


def prefix_paths(prompts: Sequence[TokenIds]) -> Iterator[tuple[int, list[Node]]]:
    """(row, nodes from the root to its own) of every row."""
    order = sorted(range(len(prompts)), key=lambda row: prompts[row].astype(">u4").tobytes())
    todo: list[tuple[list[int], int, list[Node]]] = [(order, 0, [])]
    while todo:
        rows, depth, path = todo.pop()
        if len(rows) == 1:
            yield rows[0], [*path, Node(len(prompts[rows[0]]) - depth, 1, rows[0])]
            continue
        end = _common_tokens(prompts[rows[0]], prompts[rows[-1]])
        if end > depth:
            path = [*path, Node(end - depth, len(rows), min(rows))]
        children: dict[int, list[int]] = {}
        for row in rows:
            if len(prompts[row]) == end:
                yield row, path
            else:
                children.setdefault(int(prompts[row][end]), []).append(row)
        todo += [(child, end, path) for child in children.values()]


def _common_tokens(one: TokenIds, other: TokenIds) -> int:
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length


CHECKOUT = Path(__file__).parents[1]
DATASETS = ("toolbench", "loogle", "nextqa")
FIGURES = (
    "prompt_tokens",
    "shared_share",
    "common_share",
    "key_portion_share",
    "rows_per_key_portion",
)
MOST_DIFFERENCE = 0.03
NO_KV = KvSize(None, "unknown", 16, "vLLM's default")


def main() -> int:
    """Compare, print, save."""
    options = _parser().parse_args()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        build_tiny_model(Path(scratch) / "tiny")
        tokenizer_file = options.tokenizer or Path(scratch) / "tiny" / "tokenizer.json"
        prompts = replace(
            read_prompts(Path(scratch) / "tiny", now=datetime.now(UTC)),
            count=token_counter(tokenizer_file),
        )
        for name in options.datasets:
            path = _imported(name, options, Path(scratch))
            record = compare(name, path, prompts, tokenizer_file)
            records.append(record)
            print("\n".join(_table(record)), flush=True)
    if options.json is not None:
        write_records(options.json, records)
    return 0 if all(_is_met(record) for record in records) else 1


def compare(name: str, path: Path, prompts: PromptReader, tokenizer_file: Path) -> dict[str, Any]:
    """A flat record: each figure as `inspect` has it (`inspect_...`) and as counted."""
    spec = load_job_file(CHECKOUT / "jobs" / f"{name}.yaml", cwd=Path.cwd())
    with open_input(spec.input.model_copy(update={"path": (str(path),)})) as data:
        template = RequestTemplate(spec, data.columns, model=spec.model)
        figures = _inspected(spec, data, template, prompts)
        ids = _token_ids(data, template, prompts, tokenizer_file)
    record: dict[str, Any] = {"job": name, "rows": len(ids)}
    record |= {f"inspect_{key}": figures[key] for key in _names()}
    record |= {f"inspect_{key}": figures[key] for key in ("bytes_tokenised", "bytes_per_token")}
    return record | direct_figures(ids)


def _inspected(
    spec: JobSpec, data: InputData, template: RequestTemplate, prompts: PromptReader
) -> dict[str, Any]:
    job = study_job(spec, data, template, prompts)
    outputs = estimate_outputs(spec, data, None, job.counted.bytes_per_token)
    return Inspected(spec, job, outputs, NO_KV).figures()


def _token_ids(
    data: InputData, template: RequestTemplate, prompts: PromptReader, tokenizer_file: Path
) -> list[TokenIds]:
    """The tokens of every prompt, in the order of the input."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    texts = (
        prompts.text(template.render(row, row_number=first + offset)).decode()
        for first, rows in data.iter_rows(template.columns_used)
        for offset, row in enumerate(rows)
    )
    return [
        np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        for text in texts
    ]


def _imported(name: str, options: argparse.Namespace, scratch: Path) -> Path:
    more = {"video_tokens": options.video_tokens} if name == "nextqa" else {}
    source = options.data / name
    return import_dataset(
        name, source, scratch / f"{name}.parquet", limit=options.rows, **more
    ).path


def _names() -> Iterator[str]:
    for name in FIGURES:
        yield f"{name}_mean"
        yield f"{name}_std"
    yield "shared_share_of_tokens"


def _difference(record: dict[str, Any], name: str) -> float:
    estimated, counted = record[f"inspect_{name}"], record[name]
    return float((estimated - counted) / counted) if counted else 0.0


def _is_met(record: dict[str, Any]) -> bool:
    names = [name for name in _names() if not name.endswith("_std")]
    return all(abs(_difference(record, name)) <= MOST_DIFFERENCE for name in names)


def _table(record: dict[str, Any]) -> Sequence[str]:
    lines = [f"\n{record['job']}, {record['rows']:,} rows\n"]
    lines += ["| figure | inspect | counted | difference |", "|---|---:|---:|---:|"]
    for name in _names():
        estimated, counted = record[f"inspect_{name}"], record[name]
        difference = f"{_difference(record, name):+.2%}"
        lines.append(f"| {name} | {estimated:,.4g} | {counted:,.4g} | {difference} |")
    return [*lines, "", f"every mean within {MOST_DIFFERENCE:.0%}: {_is_met(record)}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=DATASETS)
    parser.add_argument("--data", type=Path, default=CHECKOUT.parent / "shared" / "datasets")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json")
    parser.add_argument("--video-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, metavar="N", help="only the first rows")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
