"""Inputs in object storage: fetched when a job is submitted, kept while it needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchrun.errors import DataError, StoreError
from batchrun.files import sync_folder
from batchrun.inputs.pin import InputPin, hard_link_inputs, link_name
from batchrun.jobspec import InputSpec
from batchrun.remote import is_url, name_of, objects
from batchrun.scratch import scratch_folder
from batchrun.types import ProgressSink

Origins = Mapping[str, str]
"""Path of a copy -> the URL of what it is a copy of."""


@contextmanager
def fetched_input(
    spec: InputSpec, folder: Path, progress: ProgressSink | None = None
) -> Iterator[tuple[InputSpec, Origins]]:
    """The input with a copy in place of each object, and where the copies come from.

    The copies lie below `folder`, and go at the end unless `keep_input` takes them; an error that
    names one names its object instead. Nothing is done for an input of files. Raises DataError,
    StorageError, StoreFullError.
    """
    if not any(map(is_url, spec.path)):
        yield spec, {}
        return
    with scratch_folder(folder) as scratch:
        origins: dict[str, str] = {}
        paths = [path for place in spec.path for path in _local(place, scratch, origins, progress)]
        try:
            yield spec.model_copy(update={"path": tuple(paths)}), origins
        except DataError as error:
            raise type(error)(_told_of_objects(str(error), origins)) from None


def keep_input(pin: InputPin, origins: Origins, links: Path) -> InputPin:
    """Keep the pinned files in `links` so that they outlive a deletion or a replacement, and say
    of copies where they come from.

    A file is linked where the file system allows it; a copy is moved there, for good once this
    returns. Raises StoreError.
    """
    links.mkdir(parents=True, exist_ok=True)
    files = []
    for file in pin.files:
        if file.path in origins:
            copy, file = Path(file.path), file.model_copy(update={"path": origins[file.path]})
            _move(copy, links / link_name(file))
        files.append(file)
    kept = pin.model_copy(update={"files": tuple(files)})
    hard_link_inputs(kept, links)
    return kept


def _local(
    place: str, scratch: Path, origins: dict[str, str], progress: ProgressSink | None
) -> Sequence[str]:
    if not is_url(place):
        return [place]
    copies: list[str] = []
    for url in objects.expand(place):
        folder = scratch / str(len(origins))
        folder.mkdir()
        copies.append(str(folder / name_of(url)))
        objects.fetch(url, Path(copies[-1]), progress)
        origins[copies[-1]] = url
    return copies


def _move(copy: Path, link: Path) -> None:
    try:
        copy.replace(link)
        sync_folder(link.parent)
    except OSError as failure:
        raise StoreError(f"{link}: cannot be written: {failure.strerror}") from None


def _told_of_objects(text: str, origins: Origins) -> str:
    for copy, url in origins.items():
        text = text.replace(copy, url)
    return text
