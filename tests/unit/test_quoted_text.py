"""What a caller sent is quoted in part: a message stays short and says what to do to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from batchrun.errors import BatchrunError, DataError
from batchrun.jobs.inputs.input_data import check_ids, open_input
from batchrun.jobs.prompts.templating import image_url
from batchrun.jobs.spec import InputSpec
from batchrun.server.api.batches import read_batch_request
from batchrun.server.api.errors import ApiError, check_choice
from batchrun.server.gateway.admission import choose_class
from batchrun.server.gateway.app import one_model
from batchrun.server.gateway.envelope import CLASS_HEADER, RefusalError, no_such_model

LONG = "ü" * 100_000


def unknown_class() -> None:
    choose_class(CIMultiDictProxy(CIMultiDict({CLASS_HEADER: LONG})), None, {})


def unknown_model() -> None:
    raise no_such_model(LONG)


@pytest.mark.parametrize(
    ("asked", "end"),
    [
        (unknown_class, "there is default"),
        (unknown_model, "does not exist or you do not have access to it."),
        (lambda: one_model([], model_id=LONG, request_id="r"), "does not exist"),
        (lambda: check_choice("purpose", LONG, ["a"]), "Supported values are: 'a'."),
        (lambda: read_batch_request({LONG: 1}, ["24h"], None), "'."),
        (lambda: image_url(LONG, None), "before it"),
    ],
)
def test_a_refusal_quotes_a_long_value_in_part(asked: Callable[[], object], end: str) -> None:
    with pytest.raises((ApiError, RefusalError, BatchrunError)) as refused:
        asked()

    assert str(refused.value).endswith(end)
    assert len(str(refused.value)) < 400
    assert len(getattr(refused.value, "param", None) or "") < 200
    assert len(getattr(refused.value, "body", b"")) < 2_000


def test_an_id_that_two_rows_share_is_quoted_in_part(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps({"id": LONG}) + "\n") * 2)

    with (
        open_input(InputSpec(path=(str(path),), id="id")) as data,
        pytest.raises(DataError, match=r"ids must be unique$") as refused,
    ):
        check_ids(data)
    assert len(str(refused.value)) < 400 + len(str(path))


@pytest.mark.parametrize("kind", [BatchrunError, lambda text: ApiError(400, text, param=text)])
def test_no_message_is_long_whoever_words_it(kind: Callable[[str], Exception]) -> None:
    error = kind(LONG)

    assert len(str(error)) < 5_000
    assert len(getattr(error, "message", "")) < 5_000
    assert len(getattr(error, "param", "")) < 5_000
    assert len(RefusalError(404, LONG, param=LONG).body) < 60_000
