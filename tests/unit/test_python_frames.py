"""Frames in and out, and structured answers as typed columns."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import gc
import json
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import polars as pl
import pytest
from pydantic import BaseModel, JsonValue

import batchrun
from batchrun.control.client import DaemonClient
from batchrun.control.submitting import find_same, prepare
from batchrun.daemon.ending import export
from batchrun.daemon.opening import request_keys
from batchrun.errors import DataError, EngineError, InputError, JobSpecError
from batchrun.home import Home
from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.prompts.template import RequestTemplate
from batchrun.jobs.prompts.templating import make_environment
from batchrun.jobs.spec import InputSpec
from batchrun.python.asking import Asked, Question, ask, served
from batchrun.python.frames import frame_of, frame_of_rows, kept_rows
from batchrun.python.mapping import _entered
from batchrun.python.schemas import parsed, response_format
from batchrun.store import jobs, results
from batchrun.store.database import open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState, Outcome, OutcomeKind


class Tone(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Place(BaseModel):
    city: str
    zip: int


class Label(BaseModel):
    """A label; {{ not a template }}."""

    tone: Tone
    stars: int
    weight: float | None
    sure: bool
    when: datetime.date
    tags: list[str]
    place: Place
    kind: Literal["a", "b"]
    either: int | str


ANSWER = (
    '{"tone": "good", "stars": 4, "weight": null, "sure": true, "when": "2026-01-02", '
    '"tags": ["x", "y"], "place": {"city": "Bonn", "zip": 53111}, "kind": "a", "either": "z"}'
)


def test_answers_become_columns_of_the_types_of_the_fields() -> None:
    table, faults = parsed(Label, [ANSWER, None, '{"tone": "good"'])

    assert table.schema == {
        "tone": pl.String,
        "stars": pl.Int64,
        "weight": pl.Float64,
        "sure": pl.Boolean,
        "when": pl.Date,
        "tags": pl.List(pl.String),
        "place": pl.Struct({"city": pl.String, "zip": pl.Int64}),
        "kind": pl.String,
        "either": pl.String,
    }
    first = table.row(0, named=True)
    assert (first["tone"], first["stars"], first["when"]) == ("good", 4, datetime.date(2026, 1, 2))
    assert (first["tags"], first["place"]["city"], first["either"]) == (["x", "y"], "Bonn", '"z"')
    assert table.row(1) == table.row(2) == (None,) * 9
    assert faults[:2] == [None, None]
    assert faults[2] is not None and faults[2].startswith("invalid_answer: Invalid JSON")


class Visit(BaseModel):
    at: datetime.datetime
    more: list[datetime.datetime]


class Visits(BaseModel):
    visits: list[Visit]


def test_times_of_any_zone_are_those_of_utc() -> None:
    texts = ["2026-01-02T03:00:00+02:00", "2026-01-02T01:00:00", "2026-01-02T01:00:00Z"]
    visits = [{"at": text, "more": texts} for text in (*texts, "0001-01-01T00:00:00+02:00")]

    table, faults = parsed(Visits, [json.dumps({"visits": visits})])

    utc = datetime.datetime(2026, 1, 2, 1)
    assert table["visits"].to_list()[0][:3] == [{"at": utc, "more": [utc] * 3}] * 3
    assert faults == [None]


def test_a_field_that_does_not_fit_is_named() -> None:
    _, faults = parsed(Place, ['{"city": "Bonn", "zip": "far"}'])

    assert faults[0] is not None and faults[0].startswith("invalid_answer: zip: Input should be")


def test_the_text_of_a_schema_is_sent_as_it_is() -> None:
    spec = Question("{{ text }}", schema=Label).spec(Path("rows.parquet"), Path("/out"))
    body = RequestTemplate(spec, ["text"], model="m").render({"text": "hi"}, row_number=0)

    sent = body["response_format"]
    assert isinstance(sent, dict)
    assert sent["json_schema"]["schema"] == Label.model_json_schema()
    assert response_format(Place) == {
        "type": "json_schema",
        "json_schema": {"name": "Place", "schema": Place.model_json_schema(), "strict": True},
    }


def test_equal_questions_about_equal_rows_are_equal_jobs(tmp_path: Path) -> None:
    table = pl.DataFrame({"text": ["a", "b"]})
    path = kept_rows(table, tmp_path)
    before = path.stat()

    again = kept_rows(pl.concat([table[:1], table[1:]], rechunk=False), tmp_path)

    assert again == path and path.stat().st_mtime_ns == before.st_mtime_ns
    assert kept_rows(table.reverse(), tmp_path) != path
    specs = [
        Question("{{ text }}", request=request).spec(path, tmp_path)
        for request in ({"seed": 1, "top_p": 1}, {"top_p": 1, "seed": 1}, {"seed": 2, "top_p": 1})
    ]
    assert specs[0].content_hash() == specs[1].content_hash() != specs[2].content_hash()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


PROD = "{model: ./v1/m, served_model_name: prod}"
TWO = "engines: [{name: a}, {model: ./v2/m, served_model_name: b}]"
ATTACHED = "engines: [{name: a}, {name: b, attach: 'http://x'}]"
FLEET = "engines: [{name: f, ray: {}}]"


@pytest.mark.parametrize(
    ("deployment", "model", "name", "place", "is_told", "is_other"),
    [
        ("model: ./v1/m", None, "default", None, False, False),
        ("model: ./v1/m", "./v1/m", "m", "v1/m", False, False),
        ("model: ./v1/m", "./v2/m", "m", "v2/m", True, True),
        (PROD, "./v1/m", "prod", "v1/m", False, False),
        (PROD, "./v2/m", "prod", "v2/m", True, True),
        (PROD, "acme/large", "prod", None, True, True),
        (f"{PROD[:-1]}, {ATTACHED}}}", "large", "large", None, False, False),
        (f"{{model: ./v1/m, {ATTACHED}}}", "./v2/m", "m", "v2/m", False, True),
        ("engines: [{adapters: {sql: ./v1}}]", "sql", "sql", None, False, False),
        (TWO, "b", "b", None, False, False),
        (TWO, "v2/m", "b", "v2/m", False, False),
        ("engines: [{attach: 'http://x'}]", "v2/m", "m", "v2/m", False, False),
        (f"{PROD[:-1]}, {FLEET}}}", "./v1/m", "prod", "v1/m", False, False),
        ("model: ./~v3", "./~v3", "~v3", "~v3", False, False),
        ("model: tiny", None, "default", None, False, False),
        ("model: tiny", "tiny", "tiny", None, False, False),
        ("model: tiny", "acme/large", "acme/large", None, True, False),
    ],
)
def test_a_model_is_its_files_and_asked_for_by_the_name_that_engines_serve(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deployment: str,
    model: str | None,
    name: str,
    place: str | None,
    *,
    is_told: bool,
    is_other: bool,
) -> None:
    """`is_told`: a deployment that is started; `is_other`: one that runs has another model."""
    monkeypatch.chdir(tmp_path)
    for folder in ("v1/m", "v2/m", "~v3"):
        Path(folder).mkdir(parents=True)
    Path("batchrun.yaml").write_text(deployment)

    found = served(model)
    specs = [Question("{{ t }}", each).spec(Path("/r"), tmp_path) for each in (model, "v1", "v2")]

    assert found[:2] == (name, place and str(tmp_path / place))
    assert (bool(found.flags), found.is_other) == (is_told, is_other)
    assert specs[0].model == name
    assert len({spec.content_hash() for spec in specs}) == 3


ORDERS: tuple[dict[str, JsonValue], ...] = (
    {"reasoning": {}, "answer": {}},
    {"answer": {}, "reasoning": {}},
)


def test_a_schema_keeps_the_order_of_its_fields(tmp_path: Path) -> None:
    table = pl.DataFrame({"text": ["a"]})
    path = kept_rows(table, tmp_path)
    specs = [
        Question("{{ text }}", request={"form": order}).spec(path, tmp_path) for order in ORDERS
    ]
    keys = [request_keys(spec, open_input(spec.input)).tolist() for spec in (*specs, specs[0])]

    assert [json.dumps(spec.request["form"]) for spec in specs] == list(map(json.dumps, ORDERS))
    assert specs[0].output.path != specs[1].output.path
    assert keys[0] == keys[2] != keys[1]


def test_an_unfinished_job_with_its_fields_in_another_order_is_not_the_same(
    tmp_path: Path,
) -> None:
    pl.DataFrame({"text": ["a"]}).write_parquet(tmp_path / "rows.parquet")
    home = Home(tmp_path / "home")
    home.create()
    made = []
    for order in ("{type: a, name: b}", "{type: a, name: b}", "{name: b, type: a}"):
        (tmp_path / "job.yaml").write_text(JOB.replace("ORDER", order))
        job = prepare(tmp_path / "job.yaml", home, is_shown=False)
        made.append(find_same(job, home) is not None)
        if len(made) == 1:
            with closing(open_store(home.store_location)) as store:
                jobs.create(store, job, now_s=0.0)

    assert made == [False, True, False]


def test_a_file_submitted_by_several_at_once_is_one_job_which_says_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pl.DataFrame({"text": ["a"]}).write_parquet("rows.parquet")
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("ORDER", "{}"))

    def submitted(home: Path) -> str:
        return batchrun.submit(file, home=home, progress=False).id

    with ThreadPoolExecutor(4) as threads:
        ids = set(threads.map(submitted, [tmp_path / "home"] * 4))
    file.write_text(JOB.replace("ORDER", "{}") + "row_timeout: 1h\n")
    again = batchrun.submit(file, home=tmp_path / "home")

    assert ids == {again.id}
    line = f"{again.id} goes on with its own row_timeout; to change that, cancel it and submit"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "is_refused"), [("tiny", False), ("another", True), (None, False)]
)
def test_answers_of_another_model_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None, *, is_refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    pl.DataFrame({"text": ["a"]}).write_parquet(tmp_path / "rows.parquet")
    (tmp_path / "job.yaml").write_text(JOB.replace("ORDER", "{}"))
    home = Home(tmp_path / "home")
    home.create()
    with closing(open_store(home.store_location)) as store:
        record = jobs.create(store, prepare(Path("job.yaml"), home, is_shown=False), now_s=0.0)
        body = json.dumps({} if model is None else {"model": model}).encode()
        outcome = Outcome(record.id, 0, 1, OutcomeKind.OK, body=body)
        results.commit(store, [(record.seq, outcome)], now_s=0.0)

    line = f"^{record.id} was answered by the model 'another', and 'tiny' answers now; submit it"
    with pytest.raises(JobSpecError, match=line) if is_refused else nullcontext():
        job = prepare(Path("job.yaml"), home, record.id, is_shown=False)
        assert json.loads(job.spec)["continue_from"] == record.id


def test_answers_are_found_behind_a_job_of_another_model_and_stay_apart_from_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path / "home[1]")
    frame = frame_of(pl.DataFrame({"text": ["a", "b"]}))

    def asked() -> Asked:
        return ask(Question("{{ text }}"), frame, home, progress=False)

    def answered(model: str, num_rows: int) -> JobRecord:
        record = jobs.get(store, asked().begin(DaemonClient(home)))
        reply = {"model": model, "choices": [{"message": {"content": model}}]}
        body = json.dumps(reply).encode()
        rows = [Outcome(record.id, row, 1, OutcomeKind.OK, body=body) for row in range(num_rows)]
        results.commit(store, [(record.seq, outcome) for outcome in rows], now_s=0.0)
        return jobs.start(store, record.id, now_s=0.0)

    home.create()
    with closing(open_store(home.store_location)) as store:
        other = answered("another", 1)
        whole = answered("tiny", 2)
        jobs.begin_finalizing(store, whole.id, JobState.COMPLETED, now_s=0.0)
        jobs.finish(store, whole.id, now_s=0.0)
        ending = jobs.request_cancel(store, other.id, now_s=0.0)
        for _ in range(2):
            assert asked().found() == whole.id
            assert asked().answers(whole.id, "raise")["response"].to_list() == ["tiny"] * 2
            export(store, ending, links=home.inputs)


JOB = """\
name: ordered
input: {path: rows.parquet, messages: [{role: user, content: "{{ text }}"}]}
request: {extra: ORDER, seed: 1}
output: {path: out.parquet}
"""


def test_pandas_keeps_index_column_names_and_whole_numbers_beside_nulls() -> None:
    frame = pd.DataFrame({"text": ["a", None], 7: [1, 2]}, index=["x", "x"])

    given = frame_of(frame)
    joined = given.joined(pl.DataFrame({"stars": [4, None], "sure": [None, True], "n": [1, 2]}))

    assert given.columns == ("text", "7")
    assert given.select(["7", "text"]).rows() == [(1, "a"), (2, None)]
    assert list(joined.index) == ["x", "x"]
    assert list(joined.columns) == ["text", 7, "stars", "sure", "n"]
    assert str(joined["stars"].dtype) == "Int64" and joined["stars"].iloc[0] == 4
    assert str(joined["sure"].dtype) == "boolean" and str(joined["n"].dtype) == "int64"


def test_pandas_takes_columns_of_any_name() -> None:
    frame = pd.DataFrame({"text": ["a"]})

    joined = frame_of(frame).joined(pl.DataFrame({"self": ["x"], "error": [None]}))

    assert list(joined.columns) == ["text", "self", "error"] and list(frame.columns) == ["text"]
    assert joined["self"].iloc[0] == "x"


def test_rows_in_plain_python_may_lack_keys() -> None:
    assert frame_of_rows([{"a": 1}, {"b": "x"}]).select(["a", "b"]).rows() == [
        (1, None),
        (None, "x"),
    ]


def holding_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value
    return value


TOOLS: list[list[Any]] = [
    [{"a": {"type": "x"}}, {"b": [1]}],
    [[{"role": "user", "content": "hi"}], [{"role": "assistant", "tool_calls": [{"id": "1"}]}]],
    [{"b": 1, "a": 2}, {"a": 1, "b": 2}],
    [1, 2.5],
    [True, 0],
    [1, "x", None],
    [[1, "x"], [{"deep": None}]],
    [2**70, 1],
    [{"n": 1}, {"n": None}],
    [[1, 2], []],
]


@pytest.mark.parametrize("values", TOOLS)
@pytest.mark.parametrize("kind", ["rows", "pandas"])
def test_a_row_is_read_as_it_was_given_whatever_others_hold(
    tmp_path: Path, values: list[Any], kind: str
) -> None:
    rows = [{"t": value, "text": "a"} for value in values]
    series = pd.Series(values, dtype=object)
    frame = frame_of_rows(rows) if kind == "rows" else frame_of(pd.DataFrame({"t": series}))

    path = kept_rows(frame.select(["t"]), tmp_path)
    with open_input(InputSpec(path=(str(path),))) as data:
        read = [row["t"] for _, rows in data.iter_rows(["t"]) for row in rows]
        picked = data.read_rows([len(values) - 1, 0], ["t"])

    assert [repr(value) for value in read] == [repr(value) for value in values]
    assert [row["t"] for row in picked] == [values[-1], values[0]]


def at(hour: int, zone_h: int) -> datetime.datetime:
    zone = datetime.timezone(datetime.timedelta(hours=zone_h))
    return datetime.datetime(2024, 1, 1, hour, 30, tzinfo=zone)


DECIMALS = [
    ["0.3333333333333333333333333333", "12345678901234.5"],
    ["2", "1.10"],
    ["1E-40", "1"],
    ["Infinity", "-Infinity"],
    ["0." + "1" * 30, "1234567890.5"],
    ["1E+2"],
    ["-0"],
]
TIMES: list[list[Any]] = [
    [at(0, 2)],
    [at(0, 2), at(0, 0)],
    [at(22, -5), at(0, 2), None],
    [at(0, 2), datetime.datetime(2024, 1, 1)],
    [datetime.time(1, tzinfo=at(0, 2).tzinfo), datetime.time(2)],
    [{"at": at(0, 2)}, {"at": at(0, 0)}],
    [{"at": at(0, 2), "price": decimal.Decimal(2)}, {"price": decimal.Decimal("1.10")}],
]


TOLD = [*([*map(decimal.Decimal, texts)] for texts in DECIMALS), *TIMES]


@pytest.mark.parametrize(
    ("kind", "values"),
    [*product(("rows", "pandas"), TOLD), ("rows", [decimal.Decimal("NaN")])],
)
def test_decimals_and_times_are_told_as_they_were_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], values: list[Any], kind: str
) -> None:
    rows = [{"t": value} for value in values]
    series = pd.Series(values, dtype=object)
    frame = frame_of_rows(rows) if kind == "rows" else frame_of(pd.DataFrame({"t": series}))

    path = kept_rows(frame.select(["t"]), tmp_path)
    with open_input(InputSpec(path=(str(path),))) as data:
        read = [row["t"] for _, rows in data.iter_rows(["t"]) for row in rows]

    assert [str(value) for value in read] == [str(value) for value in values]
    assert [type(value) for value in read] == [type(value) for value in values]
    assert capfd.readouterr().err == ""


class Price(decimal.Decimal):
    def __str__(self) -> str:
        return f"${super().__str__()}"


class Day(datetime.datetime):
    def __str__(self) -> str:
        return self.strftime("%d.%m.%Y")


PRICE, LONG = decimal.Decimal("9.99"), decimal.Decimal("0.3333333333333333333333333333")
DAY = datetime.date(2024, 1, 1)
AMONG_OTHERS: list[tuple[list[Any], str, str]] = [
    ([PRICE, 10.5], "{{ c * 1.2 }}", "11.988"),
    ([PRICE, "none"], "{{ c + 0.5 }}", "10.49"),
    ([LONG, 10.5], "{{ c }}", str(LONG)),
    ([decimal.Decimal("1E+999"), 1], "{{ c }}", "1E+999"),
    ([{"price": PRICE, "tax": 0.2}, {"price": 10}], "{{ c.price * (1 + c.tax) }}", "11.988"),
    ([{"price": PRICE}, {"tax": 1}], "{{ c }}", "{'price': 9.99}"),
    ([DAY, "unknown"], "{{ c[:4] }} {{ c > '2023' }}", "2024 True"),
    ([{"at": [DAY, "x"]}], "{{ c }}", "{'at': ['2024-01-01', 'x']}"),
    ([at(0, 2), "x"], "{{ c }}", "2024-01-01T00:30:00+02:00"),
    ([at(0, 2), Day(2024, 1, 1, tzinfo=datetime.UTC)], "{{ c }}", "2024-01-01 00:30:00+02:00"),
    ([{"p": decimal.Decimal("1.10")}, {"p": PRICE * 10}], "{{ c.p }}", "1.10"),
    ([{"p": decimal.Decimal("1.10")}, {"p": LONG}], "{{ c }}", "{'p': Decimal('1.10')}"),
    ([{"at": at(0, 2)}, {"x": 1}], "{{ c.at }}", "2024-01-01 00:30:00+02:00"),
    ([Price("5"), Price("1.25")], "{{ c }}", "5"),
    ([Price(LONG), "x"], "{{ c }}", str(LONG)),
    ([Day(2024, 1, 1, tzinfo=datetime.UTC)], "{{ c }}", "2024-01-01 00:00:00+00:00"),
]


@pytest.mark.parametrize(("values", "template", "expected"), AMONG_OTHERS)
def test_decimals_and_times_among_others_are_numbers_and_texts_of_json(
    tmp_path: Path, values: list[Any], template: str, expected: str
) -> None:
    path = kept_rows(frame_of_rows([{"c": value} for value in values]).select(["c"]), tmp_path)
    with open_input(InputSpec(path=(str(path),))) as data:
        [row] = data.read_rows([0], ["c"])

    assert make_environment().from_string(template).render(row) == expected


def test_equal_decimals_have_a_type_of_their_own() -> None:
    table = frame_of_rows([{"d": decimal.Decimal(text)} for text in ("1.10", "20.00")])

    assert table.select(["d"]).dtypes == [pl.Decimal(38, 2)]


def test_a_row_that_looks_like_what_stands_for_a_time_is_left_as_it_is(tmp_path: Path) -> None:
    values = [{"batchrun.date": "no day"}, {"batchrun.time": 5}, {"batchrun.Decimal": None}]

    path = kept_rows(frame_of_rows([{"t": value} for value in values]).select(["t"]), tmp_path)

    with open_input(InputSpec(path=(str(path),))) as data:
        assert [row["t"] for _, rows in data.iter_rows(["t"]) for row in rows] == values


def test_values_of_one_form_have_a_type_of_their_own() -> None:
    rows = [{"day": datetime.date(2026, 1, 2), "box": {"raw": b"x", "n": 1}, "list": ["a"]}] * 2

    table = frame_of_rows(rows).select(["day", "box", "list"])

    kinds = [pl.Date(), pl.Struct({"raw": pl.Binary(), "n": pl.Int64()}), pl.List(pl.String())]
    assert table.dtypes == kinds


@pytest.mark.parametrize("failure", [pl.exceptions.PanicException, OverflowError])
def test_what_a_library_raises_on_a_frame_is_a_line(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise failure("no such\nthing")

    monkeypatch.setattr(pl, "from_pandas", refuse)
    monkeypatch.setattr(pl, "from_arrow", refuse)

    with pytest.raises(DataError, match=r"^column 'n' of the frame cannot be read: no such thing$"):
        frame_of(pd.DataFrame({"n": [1]})).select(["n"])
    with pytest.raises(DataError, match=r"^the columns of the table .*: no such thing$"):
        frame_of(pl.DataFrame({"n": [1]}).to_arrow()).select(["n"])


def test_bytes_in_dicts_of_other_keys_are_told_as_by_polars(tmp_path: Path) -> None:
    for one, other in ((b"1", b"2"), (range(3), [1])):
        table = frame_of_rows([{"a": {"x": one}}, {"a": {"y": other}}]).select(["a"])
        assert table["a"].dtype != pl.Object
        assert kept_rows(table, tmp_path).exists()


def test_values_without_end_are_refused_and_columns_without_a_name_are_not(tmp_path: Path) -> None:
    own: dict[str, object] = {}
    own["me"] = own
    deep: list[object] = []
    for _ in range(5_000):
        deep = [deep]
    for value in (own, deep):
        with pytest.raises(DataError, match=r"^column 'a' of the rows cannot be read: "):
            frame_of_rows([{"a": value}]).select(["a"])
    assert kept_rows(frame_of_rows([{"": 1}]).select([""]), tmp_path).exists()


@pytest.mark.parametrize("odd", [holding_itself(), "\ud800", decimal.Decimal("NaN")])
def test_columns_that_no_template_reads_may_hold_anything(odd: object) -> None:
    rows: list[Any] = [{"text": "a", "odd": odd}, {"text": "b", 1: 2}]
    frame = frame_of_rows(rows)

    assert frame.select(["text"]).rows() == [("a",), ("b",)]


def test_bytes_among_other_values_are_refused(tmp_path: Path) -> None:
    table = frame_of_rows([{"a": b"x"}, {"a": "x"}]).select(["a"])

    with pytest.raises(DataError, match=r"^the rows cannot be written as Parquet: a bytes within"):
        kept_rows(table, tmp_path)


def test_what_no_file_can_hold_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^the rows cannot be written as Parquet: an? object"):
        kept_rows(frame_of_rows([{"a": object()}]).select(["a"]), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("heavy", ["polars", "pydantic", "rich", "sqlalchemy", "pyarrow"])
def test_to_import_batchrun_loads_little(heavy: str) -> None:
    program = f"import sys, batchrun; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Count(BaseModel):
    n: int
    more: list[int] = []


def test_a_number_that_no_column_holds_is_the_fault_of_its_answer() -> None:
    large = ['{"n": 99999999999999999999999}', '{"n": 2, "more": [9223372036854775808]}']

    table, faults = parsed(Count, ['{"n": 1}', *large, '{"n": 3}'])

    assert table["n"].to_list() == [1, None, None, 3]
    assert faults[0] is faults[3] is None
    assert faults[1] == "invalid_answer: n: is beyond 64 bits"
    assert faults[2] == "invalid_answer: more: is beyond 64 bits"


class Branch(BaseModel):
    name: str
    below: list[Branch] = []


class Calls(BaseModel):
    back: Callable[[int], int]


def test_a_model_that_holds_itself_is_json_text() -> None:
    table, faults = parsed(Branch, ['{"name": "a", "below": [{"name": "b"}]}'])

    assert faults == [None]
    assert json.loads(table["below"][0]) == [{"name": "b", "below": []}]


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        (Question("{{ t }}", schema=Calls), "^the schema Calls cannot be asked for: Cannot gener"),
        (
            Question("{{ t }}", schema=Count, request={"response_format": {"type": "text"}}),
            "^give schema or response_format, not both$",
        ),
    ],
)
def test_a_schema_that_cannot_be_asked_for_is_refused(question: Question, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        question.spec(Path("rows.parquet"), Path("/out"))


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (Question("\ud800 {{ t }}"), "surrogates not allowed"),
        (Question("{{ t }}", request={"stop": "\ud800"}), "surrogates not allowed"),
        (
            Question("{{ t }}", request={"logit_bias": {(1, 2): 1}}),
            "keys must be str, .* not tuple",
        ),
        (Question("{{ t }}", request={"logit_bias": holding_itself()}), "Circular reference"),
    ],
)
def test_what_no_job_can_hold_is_refused_in_a_line(question: Question, reason: str) -> None:
    with pytest.raises(InputError, match=f"^no job can hold the template .*{reason}"):
        question.spec(Path("rows.parquet"), Path("/out"))


def test_a_template_that_is_too_long_is_refused_daemon_or_not(tmp_path: Path) -> None:
    frame = frame_of(pl.DataFrame({"t": ["a"]}))
    question = Question("x" * (4 << 20) + "{{ t }}")

    with pytest.raises(JobSpecError, match=r"put long text into a column of the input$"):
        ask(question, frame, Home(tmp_path), progress=False)


def test_a_kind_of_pandas_frame_is_one() -> None:
    kind = type("GeoDataFrame", (pd.DataFrame,), {})

    assert frame_of(kind({"text": ["a"]})).select(["text"]).rows() == [("a",)]


def test_a_column_that_polars_cannot_read_is_named() -> None:
    given = frame_of(pd.DataFrame({"wave": [1j]}))

    with pytest.raises(DataError, match=r"^column 'wave' of the frame cannot be read: "):
        given.select(["wave"])


def test_categories_are_the_text_that_they_stand_for(tmp_path: Path) -> None:
    plain = pl.DataFrame({"text": ["a", "b"]})
    same = [plain.cast({"text": kind}) for kind in (pl.Categorical, pl.Enum(["a", "b"]))]

    assert {kept_rows(table, tmp_path) for table in same} == {kept_rows(plain, tmp_path)}


@pytest.mark.parametrize("rows", [None, "abc", ["a"], [1], pl.DataFrame({"text": ["a"]})])
async def test_what_is_no_row_is_refused_by_a_stream(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(
        InputError, match=r"^stream takes rows, each a dict by column; frames go to batchrun\.map$"
    ):
        async for _ in batchrun.stream(rows, "{{ text }}", home=tmp_path):
            pass


@pytest.mark.parametrize("kind", [pl.Int128(), pl.UInt128()])
def test_whole_numbers_of_128_bits_are_read_as_they_are(tmp_path: Path, kind: pl.DataType) -> None:
    values = [{"a": 2**100, "b": [2**126], "c": {"n": 7}, "d": "x"}]
    kinds = {"a": kind, "b": pl.List(kind), "c": pl.Struct({"n": kind}), "d": pl.String()}

    path = kept_rows(pl.DataFrame(values, schema=kinds), tmp_path)

    with open_input(InputSpec(path=(str(path),))) as data:
        assert data.read_rows([0], list(kinds)) == values


@pytest.mark.parametrize("fails", [False, True])
async def test_a_deployment_that_starts_while_its_stream_is_cancelled_is_stopped_later(
    tmp_path: Path, *, fails: bool
) -> None:
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    seen, complaints = list[str](), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))

    class Up(AbstractContextManager[DaemonClient]):
        def __enter__(self) -> DaemonClient:
            begun.set()
            may_go_on.wait()
            seen.append("up")
            if fails:
                ended.set()
                raise EngineError("no engine")
            return DaemonClient(Home(tmp_path))

        def __exit__(self, *_: object) -> None:
            seen.append("stopped")
            ended.set()

    async def call() -> None:
        async with _entered(Up()):
            seen.append("used")

    task = asyncio.create_task(call())
    await asyncio.to_thread(begun.wait)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    was_waiting = not task.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(ended.wait)
    gc.collect()
    await asyncio.sleep(0)

    assert not was_waiting
    assert seen == (["up"] if fails else ["up", "stopped"])
    assert complaints == []


class Refused(AbstractContextManager[DaemonClient]):
    def __enter__(self) -> DaemonClient:
        raise EngineError("no engine")

    def __exit__(self, *_: object) -> None:
        raise AssertionError


async def test_a_deployment_that_does_not_start_is_not_stopped() -> None:
    with pytest.raises(EngineError, match=r"^no engine$"):
        async with _entered(Refused()):
            pass


def test_what_errors_are_to_be_is_told_to_those_who_give_none(tmp_path: Path) -> None:
    wrong: Any = None
    with pytest.raises(InputError, match=r"^errors must be one of column, raise, not 'None'$"):
        batchrun.map(pl.DataFrame({"text": ["a"]}), "{{ text }}", home=tmp_path, errors=wrong)


def test_a_process_that_is_forked_after_a_call_is_told_what_to_use_instead() -> None:
    frame_of(pd.DataFrame({"text": ["a"]}))
    ours, theirs = multiprocessing.Pipe()

    def call() -> None:
        takes: list[Callable[[], object]] = [
            lambda: frame_of(pd.DataFrame()),
            lambda: frame_of_rows([]),
        ]
        for take in takes:
            try:
                take()
                theirs.send("taken")
            except InputError as refusal:
                theirs.send(str(refusal))

    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    said = [ours.recv(), ours.recv()]
    child.join()

    assert all('start method "spawn"' in line for line in said), said


KEPT: list[tuple[list[Any], list[Any]]] = [
    ([["x"], 3], ['["x"]', "3"]),
    ([True, 1], ["true", "1"]),
    ([{"a": 1}, [1]], ['{"a": 1}', "[1]"]),
    ([{"a": [1]}, {"a": 5}, None], ['{"a": [1]}', '{"a": 5}', None]),
    ([[True], [5]], ["[true]", "[5]"]),
    ([1, 2.5], [1.0, 2.5]),
    ([["x", 1], 2**70, "y"], ['["x", 1]', str(2**70), "y"]),
    ([{"a": 1}, {"b": "x"}], [{"a": 1, "b": None}, {"a": None, "b": "x"}]),
    ([True, -(2**127)], ["true", str(-(2**127))]),
    ([{"a": [{"b": True}, {"b": 1}]}, None], ['{"a": [{"b": true}, {"b": 1}]}', None]),
    ([[2**127], [1]], [f"[{2**127}]", "[1]"]),
    ([2**127, 1], [str(2**127), "1"]),
    ([[], [2**64], [2.5]], [[], [2.0**64], [2.5]]),
]


@pytest.mark.parametrize(("values", "expected"), KEPT)
def test_kept_values_of_several_kinds_are_json_text_and_the_other_columns_as_they_are(
    tmp_path: Path, values: list[Any], expected: list[Any]
) -> None:
    home, output = Home(tmp_path / "home"), tmp_path / "out[1].jsonl"
    home.create()
    rows = [
        {"id": n, "k": value, "mixed": mixed, "n": [n], "response": "a", "error": None}
        for n, (value, mixed) in enumerate(zip(values, (1, {"a": 2}, []), strict=False))
    ]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Question("{{ t }}").spec(tmp_path / "rows.parquet", tmp_path).model_dump(mode="json")
    spec["output"]["path"] = str(output)
    with closing(open_store(home.store_location)) as store:
        job = jobs.create(store, jobs.NewJob("n", json.dumps(spec), "{}", "h", 2), now_s=1.0)
        jobs.start(store, job.id, now_s=1.0)
        jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=1.0)
        jobs.finish(store, job.id, now_s=1.0)

    table = batchrun.Job(job.id, home).results().collect()

    assert table["k"].to_list() == expected
    assert table["mixed"].to_list()[:2] == ["1", '{"a": 2}']
    assert table.select("id", "n", "response", "error").rows() == [
        (n, [n], "a", None) for n in range(len(values))
    ]
