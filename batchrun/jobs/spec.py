"""What a job file says, as frozen values that survive JSON unchanged."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
)

from batchrun.config import OnDone, OnDoneKey
from batchrun.errors import ConfigError
from batchrun.files import check_place
from batchrun.quantities import FailureLimit, parse_duration_s, parse_optional_duration_s
from batchrun.strict import Strict

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
InputFormat = Literal["auto", "parquet", "jsonl", "json", "csv", "tsv", "openai-batch"]

OUTPUT_COLUMNS = (
    "id",
    "response",
    "finish_reason",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "attempts",
    "error",
    "body",
)
"""The columns that batchrun writes; an input column of such a name cannot be kept."""

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1_000_000
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
"""A job's share of computed tokens beside others; within the bounds no share rounds to nothing."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


Place = Annotated[Text, AfterValidator(check_place)]
"""A path, or the URL of an object."""


_IN_HUB = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?/(.+)")


def _in_hub_cache(place: object) -> object:
    """What an `hf://` address, a glob too, stands for in this machine's Hugging Face cache, as a
    path; nothing is fetched. Other places as they are. Raises ValueError."""
    if not isinstance(place, str) or not place.startswith("hf://"):
        return place
    found = _IN_HUB.fullmatch(place)
    if found is None:
        raise ValueError(f"write hf://datasets/OWNER/NAME[@REVISION]/FILE (got {place!r})")
    # Takes 0.3 s, which only those who name such places shall wait.
    from huggingface_hub import snapshot_download

    name, file = found[1], found[3]
    revision = re.sub("^~", "refs/convert/", unquote(found[2] or "main"))
    given = "" if found[2] is None else f" --revision {revision}"
    missing = f"{place}: not in the local cache; hf download --repo-type dataset {name}{given}"
    try:
        folder = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=file, local_files_only=True
        )
    except (OSError, ValueError):
        raise ValueError(missing) from None
    if glob.has_magic(file):
        return str(Path(glob.escape(folder), file))
    if not Path(folder, file).exists():
        raise ValueError(missing)
    return str(Path(folder, file))


InputPlace = Annotated[Place, BeforeValidator(_in_hub_cache)]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w .:@+-]{0,127}", name):
        raise ValueError(
            f"must be 1 to 128 letters, digits, spaces or any of . _ : @ + - (got {name!r})"
        )
    return name


class _Strict(Strict):
    model_config = ConfigDict(allow_inf_nan=False)


class InputSpec(_Strict):
    """Where the rows come from and how a row becomes a request.

    `path` holds paths, URLs of objects, or globs of either; of an `hf://` address, the path in the
    cache. One of `messages`, `prompt` and `input` is the template of the request (which one, the
    endpoint says); none for an OpenAI batch file.
    """

    path: Annotated[tuple[InputPlace, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    format: InputFormat = "auto"
    id: Text | None = None
    messages: JsonValue = None
    prompt: JsonValue = None
    input: JsonValue = None


class OutputSpec(_Strict):
    """Where the answers go. `keep`: input columns to join back; `body`: the whole reply too.

    With `rows_per_file` the path is that of a folder, of files with so many rows each.
    """

    path: Place
    keep: tuple[Text, ...] = ()
    body: bool = False
    rows_per_file: Annotated[int | None, Field(gt=0, strict=True)] = None

    @model_serializer(mode="wrap")
    def _without_what_is_not_said(self, as_usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Jobs that other versions read, or compare, have no key that is not theirs."""
        values: dict[str, Any] = as_usual(self)
        if self.rows_per_file is None:
            values.pop("rows_per_file", None)
        return values

    @field_validator("path")
    @classmethod
    def _known_suffix(cls, path: str) -> str:
        if not path.endswith((".parquet", ".jsonl")):
            raise ValueError(f"must end in .parquet or .jsonl (got {path!r})")
        return path

    @field_validator("keep")
    @classmethod
    def _no_clash(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for column in keep:
            if column in OUTPUT_COLUMNS:
                raise ValueError(f"{column!r} is a column that batchrun writes itself; rename it")
            if keep.count(column) > 1:
                raise ValueError(f"{column!r} is listed twice")
        return keep


class Source(_Strict):
    """The job file a spec was read from, so that later errors can name file and line."""

    path: str
    lines: dict[str, int]


class JobFile(_Strict):
    """The keys a user may write in a job file."""

    name: Annotated[str, AfterValidator(_checked_name)]
    model: Text = "default"
    endpoint: Endpoint = "/v1/chat/completions"
    input: InputSpec
    request: dict[str, JsonValue] = Field(default_factory=dict)
    output: OutputSpec
    deadline: Annotated[float | None, BeforeValidator(parse_optional_duration_s)] = None
    start: Literal["now", "cheap"] = "now"
    weight: Weight = 1.0
    retries: Annotated[int, Field(ge=0, le=100, strict=True)] = 3
    row_timeout: Annotated[float, BeforeValidator(parse_duration_s)] = Field(
        default="24h", validate_default=True
    )
    max_failed: FailureLimit | None = None
    on_done: OnDoneKey = None


_UNHASHED = ("start", "row_timeout", "on_done")
_LIMITS = ("deadline", "weight", "retries", "max_failed")
ASIDE = (*_UNHASHED, *_LIMITS)
"""Keys of a job file that make no other job."""


MAX_SPEC_CHARS = 4 << 20
"""Of a job's JSON text, its templates and fields."""


class JobSpec(JobFile):
    """A job as the daemon keeps it: all paths absolute, the format of the input known.

    `continue_from` is the id of a job whose finished rows are taken over where they are the same.
    """

    source: Source | None = None
    continue_from: str | None = None

    @field_validator("weight", mode="before")
    @classmethod
    def _at_least_the_minimum(cls, weight: object) -> object:
        """A store may hold jobs from before there was a lower bound; they run at that bound."""
        is_too_low = isinstance(weight, int | float) and 0 < weight < MIN_WEIGHT
        return MIN_WEIGHT if is_too_low else weight

    @property
    def deadline_s(self) -> float | None:
        """Length of the completion window in seconds, from the submission on."""
        return self.deadline

    @property
    def is_openai_batch(self) -> bool:
        """Whether each input row is a complete request of its own."""
        return self.input.format == "openai-batch"

    def content_hash(self) -> str:
        """Hex digest that is equal for two submissions of the same job, wherever they are read.

        The order within fields of the request does not count here; see `told_fields`.
        """
        usual = {key: JobFile.model_fields[key].default for key in _LIMITS}
        return self.model_copy(update=usual).limits_hash()

    def limits_hash(self) -> str:
        """A `content_hash` in which deadline, weight, retries and max_failed count, as in stores
        that older versions wrote."""
        values = self.model_dump(mode="json", exclude={"source", "continue_from", *_UNHASHED})
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()

    def where(self, key: str) -> str:
        """`FILE:LINE: KEY` for an error message, or the key alone when there was no file."""
        if self.source is None:
            return key
        parent = key
        while parent and parent not in self.source.lines:
            parent = parent[: max(parent.rfind("."), parent.rfind("["), 0)]
        return f"{self.source.path}:{self.source.lines.get(parent, 1)}: {key}"


def told_fields(request: Mapping[str, object]) -> str:
    """A request's fields as JSON text, in one order whatever theirs is; what is within a field
    stays in its own, which a model that answers by a schema follows."""
    fields = {name: request[name] for name in sorted(request)}
    return json.dumps(fields, separators=(",", ":"))


SECRET_PREFIX = "whsec_"
"""Before the base64 of a secret, as Standard Webhooks writes it; other text is taken as it is."""


def read_secret(on_done: OnDone) -> bytes | None:
    """What signs the calls of a webhook. Raises ConfigError."""
    if on_done.secret_file is None:
        return None
    try:
        text = Path(on_done.secret_file).read_text(encoding="utf-8").strip()
        is_encoded = text.startswith(SECRET_PREFIX)
        encoded = text.removeprefix(SECRET_PREFIX)
        secret = b64decode(encoded, validate=True) if is_encoded else text.encode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{on_done.secret_file}: cannot be read: {reason}") from None
    if not secret:
        raise ConfigError(f"{on_done.secret_file}: is empty; put a secret into it")
    return secret
