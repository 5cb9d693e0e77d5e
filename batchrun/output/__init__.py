"""The file that a job ends with."""

from batchrun.output.atomic import atomic_file
from batchrun.output.rows import ResultRow, error_text, response_text
from batchrun.output.writing import write_output

__all__ = ["ResultRow", "atomic_file", "error_text", "response_text", "write_output"]
