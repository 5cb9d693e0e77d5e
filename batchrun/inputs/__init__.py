"""Input files as numbered rows, and rows as request bodies."""

from batchrun.inputs.base import ROW_LIMIT_BYTES, Row, is_blank
from batchrun.inputs.data import InputData
from batchrun.inputs.fetching import Origins, fetched_input, keep_input
from batchrun.inputs.ids import check_ids
from batchrun.inputs.native import native_rows, plain_json
from batchrun.inputs.opening import check_columns, open_input, open_pinned
from batchrun.inputs.pin import InputPin, PinnedFile, hard_link_inputs, verify_pin
from batchrun.inputs.prefix_text import prefix_text
from batchrun.inputs.template import RequestTemplate, RowRenderError

__all__ = [
    "ROW_LIMIT_BYTES",
    "InputData",
    "InputPin",
    "Origins",
    "PinnedFile",
    "RequestTemplate",
    "Row",
    "RowRenderError",
    "check_columns",
    "check_ids",
    "fetched_input",
    "hard_link_inputs",
    "is_blank",
    "keep_input",
    "native_rows",
    "open_input",
    "open_pinned",
    "plain_json",
    "prefix_text",
    "verify_pin",
]
