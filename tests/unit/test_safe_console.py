"""Nothing that callers or engines said makes a terminal obey."""

from __future__ import annotations

import io
import json
import sys

import pytest

import batchrun.cli.main as cli
from batchrun.cli import status
from batchrun.cli.console import answer, columns, named_lines, out, safe_json
from batchrun.control.following import SafeConsole
from batchrun.errors import UNSAFE
from batchrun.quantities import count

ODD = "a\x1b]0;title\x07b\x9b31m\u202ec\u2066d\x7fe\rf\x00"


@pytest.mark.parametrize(
    "shown", [ODD, columns("id", ODD, rows=[["1", ODD]]), named_lines([("why", ODD)], title=ODD)]
)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_terminal_would_obey_is_shown_as_replaced(
    *, shown: object, is_terminal: bool
) -> None:
    text = io.StringIO()
    console = SafeConsole(
        file=text, width=300, markup=False, highlight=False, force_terminal=is_terminal
    )

    console.print(shown)

    written = text.getvalue()
    for style in ("\x1b[1m", "\x1b[3m", "\x1b[0m"):
        written = written.replace(style, "")
    assert "b" in written and "\ufffd" in written
    assert UNSAFE.findall(written) == []


def test_json_keeps_what_was_said_and_shows_it_safely() -> None:
    document = {"message": ODD, "tab": "\t", "text": "grün \u2028 😀"}

    assert UNSAFE.findall(safe_json(document)) == []
    assert json.loads(safe_json(document)) == document
    assert "grün" in safe_json(document)


def test_what_the_encoding_of_stdout_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    octets = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(octets, "latin-1"))

    def say() -> int:
        out.print("grün \u2192 so")
        answer({"text": "grün 😀"}, as_json=True)
        return 0

    monkeypatch.setattr(cli, "call", say)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    sys.stdout.flush()

    line, text = octets.getvalue().decode("latin-1").splitlines()
    assert (caught.value.code, line, json.loads(text)) == (0, "grün ? so", {"text": "grün 😀"})


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_line_ends_with_blanks(*, is_terminal: bool) -> None:
    text = io.StringIO()
    console = SafeConsole(file=text, width=60, force_terminal=is_terminal, color_system=None)

    console.print(columns("job", "state", rows=[["a", "b"], ["longer", "much longer   "]]))
    console.print(named_lines([("name", "said"), ("longer name", "x")], title="a title"))
    console.print("and a line   ")

    assert [line for line in text.getvalue().splitlines() if line != line.rstrip()] == []
    assert " longer  much longer" in text.getvalue()


def test_one_row_is_no_rows() -> None:
    assert [count(num, "row") for num in (0, 1, 1_200)] == ["0 rows", "1 row", "1,200 rows"]


@pytest.mark.parametrize("width_chars", [80, 100])
def test_the_list_of_jobs_cuts_no_digit(monkeypatch: pytest.MonkeyPatch, width_chars: int) -> None:
    view = {
        "id": "job_des4016c31", "name": "nightly-summaries", "state": "running", "stage": None,
        "is_deadline_kept": True, "num_completed": 11_345_678, "num_failed": 1_204,
        "num_rows": 12_345_678, "rows_per_s": 1234.5, "eta_s": 98_765.0, "eta_low_s": 87_654.0,
        "eta_high_s": 109_876.0, "hit_rate": 0.93,
    }  # fmt: skip
    console = SafeConsole(file=io.StringIO(), width=width_chars, soft_wrap=True)
    monkeypatch.setattr(status, "out", console)
    with console.capture() as captured:
        console.print(status._job_table([view], is_run=True))

    text = captured.get()
    for figure in ("11,345,678", " 1,204", "12,345,678", "92%", "27h26m", "(24h20m", "30h31m)"):
        assert figure in text
    assert ("93%" in text) == (width_chars == 100)
    assert max(map(len, text.splitlines())) <= width_chars
    view |= {"stage": "waiting for /data/inputs-2026-11-29-evening.parquet", "num_rows": 20}
    view |= {"num_completed": 5, "num_failed": 0}
    with console.capture() as captured:
        console.print(status._job_table([view], is_run=True))
    assert max(map(len, captured.get().splitlines())) <= width_chars
