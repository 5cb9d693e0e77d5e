"""A multipart form with one file, parsed as it comes in: bounded fields, and the file in pieces."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batchrun.api.errors import ApiError

FILE_FIELD = "file"
TEXT_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
MAX_FIELD_BYTES = 4_096


class UploadForm:
    """Takes the body of `POST /v1/files` in pieces and gives those of its file back.

    `fields` and `filename` are known once their parts have come. Methods raise ApiError.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
            message = f"Missing required parameter: '{FILE_FIELD}' (send multipart/form-data)."
            raise ApiError(400, message, code="missing_required_parameter", param=FILE_FIELD)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._name: str | None = None
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._text = bytearray()
        self._pieces: list[bytes] = []
        self._is_file = False
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take a piece of the body; returns the pieces of the file in it."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, "The body is not a valid multipart form.") from error
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """The body is over; refuse one that breaks off."""
        if not self._has_ended:
            raise ApiError(400, "The multipart form breaks off before its end.")

    def _on_part_begin(self) -> None:
        self._name, self._is_file, self._disposition = None, False, b""
        self._text.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options and self._name == FILE_FIELD
        if not self._is_file and self._name not in TEXT_FIELDS:
            if self._name == FILE_FIELD:
                raise ApiError(
                    400,
                    f"'{FILE_FIELD}' must be a file: its part needs a filename.",
                    code="missing_required_parameter",
                    param=FILE_FIELD,
                )
            message = f"Unknown parameter: '{self._name[:64]}'."
            raise ApiError(400, message, code="unknown_parameter", param=self._name[:64])
        if self.filename is not None if self._is_file else self._name in self.fields:
            raise ApiError(400, f"'{self._name}' is given twice.", param=self._name)
        if self._is_file:
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise ApiError(400, f"'{self._name}' is too long.", param=self._name)

    def _on_part_end(self) -> None:
        if not self._is_file and self._name is not None:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._has_ended = True
