"""Job files from disk to `JobSpec`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from batchrun.errors import DataError, JobSpecError
from batchrun.files import absolute
from batchrun.jobs.job_file import input_files, load_job_file
from batchrun.jobs.spec import MIN_WEIGHT, JobSpec
from batchrun.pool.deadlines import JobWork, tokens_ahead

JOB = """\
name: loogle
input:
  path: ../data/loogle.parquet
  id: id
  messages:
    - role: user
      content: "{{ document }} {{ question }}"
request: {max_tokens: 64, temperature: 0}
output: {path: results/loogle.parquet, keep: [question]}
deadline: 6h
retries: 3
max_failed: 5%
"""


def write_job(folder: Path, text: str = JOB) -> Path:
    path = folder / "jobs" / "job.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def batch_job(folder: Path, lines: list[object]) -> Path:
    (folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_job(folder, "name: b\ninput: {path: ../batch.jsonl}\noutput: {path: out.jsonl}\n")


def test_input_is_relative_to_the_file_and_output_to_the_caller(tmp_path: Path) -> None:
    spec = load_job_file(write_job(tmp_path), cwd=tmp_path / "elsewhere")
    assert spec.input.path == (str(tmp_path / "data" / "loogle.parquet"),)
    assert spec.output.path == str(tmp_path / "elsewhere" / "results" / "loogle.parquet")


@pytest.mark.parametrize("written", ["*.jsonl", "../run[[]1]/a.jsonl", "a.jsonl"])
def test_the_folder_of_a_job_file_is_no_pattern(tmp_path: Path, written: str) -> None:
    """`run1`, which the name of the folder stands for as a pattern, has an input too."""
    for name in ("run1", "run[1]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("{}\n")
    path = tmp_path / "run[1]" / "job.yaml"
    path.write_text(JOB.replace("../data/loogle.parquet", f'"{written}"'))

    spec = load_job_file(path, cwd=tmp_path)

    assert input_files(spec.input.path) == [tmp_path / "run[1]" / "a.jsonl"]
    (tmp_path / "run[1]" / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"run\[1\].*: (no such file|no file matches)"):
        input_files(load_job_file(path, cwd=tmp_path).input.path)


@pytest.mark.parametrize("name", ["~t.parquet", "~root/t.parquet"])
def test_a_home_is_meant_only_where_a_path_begins_with_it(tmp_path: Path, name: str) -> None:
    text = JOB.replace("../data/loogle.parquet", f"./{name}")
    text = text.replace("results/loogle.parquet", f"./{name}")
    text += f"on_done: {{webhook: 'https://a.test', secret_file: ./{name}}}\n"
    path = write_job(tmp_path, text)

    spec = load_job_file(path, cwd=tmp_path)

    assert spec.input.path == (str(path.parent / name),)
    assert spec.output.path == str(tmp_path / name)
    assert spec.on_done is not None
    assert spec.on_done.secret_file == str(path.parent / name)


def test_numbers_among_the_words_of_on_done_are_text_as_they_stand_there(tmp_path: Path) -> None:
    path = write_job(tmp_path, JOB + "on_done: [tell, 1e5, 007, 1_000, 1.10]\n")

    on_done = load_job_file(path, cwd=tmp_path).on_done

    assert on_done is not None and on_done.command == ("tell", "1e5", "007", "1_000", "1.10")


def test_names_that_are_not_utf_8_are_told(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    (folder / "jobs").mkdir(parents=True)
    (folder / "a.jsonl").touch()

    with pytest.raises(JobSpecError, match=r"caf\\xe9.*: not UTF-8; rename"):
        load_job_file(write_job(folder), cwd=tmp_path)
    with pytest.raises(DataError, match=r"caf\\xe9.*: not UTF-8; rename"):
        input_files([str(tmp_path / "*" / "*.jsonl")])


def test_defaults_are_those_of_the_manual(tmp_path: Path) -> None:
    spec = load_job_file(write_job(tmp_path), cwd=tmp_path)
    assert (spec.model, spec.endpoint, spec.weight) == ("default", "/v1/chat/completions", 1.0)
    assert (spec.deadline_s, spec.retries) == (21_600, 3)


def test_a_spec_survives_json_exactly(tmp_path: Path) -> None:
    spec = load_job_file(write_job(tmp_path), cwd=tmp_path)
    again = JobSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert again.content_hash() == spec.content_hash()


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 9.99e-7])
def test_a_stored_job_with_a_smaller_weight_runs_at_the_least(
    tmp_path: Path, weight: float
) -> None:
    """Stores from before the bound hold such jobs, and `status` foretells their ends."""
    stored = load_job_file(write_job(tmp_path), cwd=tmp_path).model_dump(mode="json")
    spec = JobSpec.model_validate_json(json.dumps(stored | {"weight": weight}))

    works = {"tiny": JobWork(spec.weight, 100.0, 0.0), "due": JobWork(1e6, 100.0, 0.0)}
    ahead = tokens_ahead(works, {"due": 0.95})

    assert spec.weight == MIN_WEIGHT
    assert ahead == pytest.approx({"due": 100, "tiny": 200})


def test_the_content_hash_ignores_comments_and_sees_values(tmp_path: Path) -> None:
    spec = load_job_file(write_job(tmp_path), cwd=tmp_path)
    commented = load_job_file(write_job(tmp_path, "# note\n" + JOB), cwd=tmp_path)
    changed = load_job_file(write_job(tmp_path, JOB.replace("64", "65")), cwd=tmp_path)
    assert commented.content_hash() == spec.content_hash()
    assert changed.content_hash() != spec.content_hash()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("messages:", "mesages:", ":5: input.mesages: unknown key (did you mean 'messages'?)"),
        ("role: user", "rol: user", ":6: input.messages[0].role: is required"),
        ("{{ question }}", "{{ question ", ":7: input.messages[0].content: template line 1:"),
        ("deadline: 6h", "deadline: soon", ":10: deadline: must be a duration"),
        ("retries: 3", "retries: -1", ":11: retries: input should be greater than or equal to 0"),
        (
            "retries: 3",
            "weight: 5e-324",
            ":11: weight: input should be greater than or equal to 0.00",
        ),
        ("[question]", "[response]", ":9: output.keep: 'response' is a column that batchrun"),
        ("loogle.parquet, keep", "loogle.xlsx, keep", ":9: output.path: must end in .parquet or"),
        ("max_tokens: 64", "stream: true", ":8: request.stream: a job's answers go to a file"),
        ("max_tokens: 64", "background: true", ":8: request.background: is not possible"),
        ("max_tokens: 64", "logit_bias: {7: -1}", ":8: request.logit_bias: a key must be text"),
        ("max_tokens: 64", "model: m", ":8: request.model: belongs at the top"),
        ("name: loogle", "name: loogle\nendpoint: /v1/completions", ":6: input.messages:"),
        ("name: loogle", "name: loogle\nendpoint: /v2", ":2: endpoint: input should be "),
        ("deadline: 6h", "deadline: 9999999d", ":10: deadline: is over ten years away"),
        ("../data/loogle.parquet", "~$data.jsonl", ":3: input.path: '~$data.jsonl': no user"),
        ("results/loogle.parquet", "~nobody-here/a.jsonl", ":9: output.path: '~nobody-here/a.j"),
        ("../data/loogle.parquet", '"a\\0b"', ":3: input.path: holds a null character"),
        ("name: loogle", "name: a/b", ":1: name: must be 1 to 128 letters"),
    ],
)
def test_a_wrong_job_file_is_one_line_with_its_place(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = write_job(tmp_path, JOB.replace(old, new))
    with pytest.raises(JobSpecError) as caught:
        load_job_file(path, cwd=tmp_path)
    assert str(caught.value).startswith(f"{path}{problem}")
    assert "\n" not in str(caught.value)


def test_a_missing_template_is_refused(tmp_path: Path) -> None:
    text = "name: x\ninput: {path: a.parquet}\noutput: {path: o.jsonl}\n"
    with pytest.raises(JobSpecError, match=r":2: input\.messages: is required"):
        load_job_file(write_job(tmp_path, text), cwd=tmp_path)


def test_an_openai_batch_file_is_recognised(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    spec = load_job_file(batch_job(tmp_path, [line]), cwd=tmp_path)
    assert spec.is_openai_batch


@pytest.mark.parametrize("before", ["\n", " \t\r\n\n", "\ufeff\n", "\ufeff"])
def test_an_openai_batch_file_may_begin_with_blank_lines(tmp_path: Path, before: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}
    path = batch_job(tmp_path, [line])
    batch = tmp_path / "batch.jsonl"
    batch.write_text(before + batch.read_text(), encoding="utf-8")

    assert load_job_file(path, cwd=tmp_path).is_openai_batch


def test_other_jsonl_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobSpecError, match="only an OpenAI batch JSONL file does without"):
        load_job_file(batch_job(tmp_path, [{"question": "why?"}]), cwd=tmp_path)


def test_a_batch_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = batch_job(tmp_path, [])
    (tmp_path / "batch.jsonl").unlink()
    with pytest.raises(DataError, match=r"batch\.jsonl: cannot be read"):
        load_job_file(path, cwd=tmp_path)


def test_an_output_over_the_input_is_refused(tmp_path: Path) -> None:
    text = JOB.replace("results/loogle.parquet", "data/loogle.parquet")
    with pytest.raises(JobSpecError, match="would overwrite the input"):
        load_job_file(write_job(tmp_path, text), cwd=tmp_path)


def test_a_later_error_finds_its_line(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    spec = load_job_file(path, cwd=tmp_path)
    assert spec.where("input.messages[0].content") == f"{path}:7: input.messages[0].content"
    assert spec.where("request.seed") == f"{path}:8: request.seed"


@pytest.mark.parametrize("place", ["link/../{}", "real/sub/../../link/../{}", "link/in/../../{}"])
def test_what_lies_above_a_link_is_above_where_it_leads(tmp_path: Path, place: str) -> None:
    (tmp_path / "real" / "sub" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/sub")
    for folder in (tmp_path, tmp_path / "real"):
        (folder / "a.jsonl").touch()
    text = JOB.replace("data/loogle.parquet", place.format("a.jsonl"))
    text = text.replace("results/loogle.parquet", place.format("out.jsonl"))

    spec = load_job_file(write_job(tmp_path, text), cwd=tmp_path)

    assert Path(spec.input.path[0]).samefile(tmp_path / "real" / "a.jsonl")
    assert Path(spec.output.path).parent.samefile(tmp_path / "real")


@pytest.mark.parametrize("place", ["", ".", "a", "./a//b/", "a/../b", "../a", "/a/../../b", "//a"])
def test_a_path_without_links_is_the_shortest(place: str) -> None:
    for folder in ("", "/no/such", "no/such/.."):
        expected = os.path.normpath(Path(folder) / place)
        assert absolute(Path(folder), place) == expected
