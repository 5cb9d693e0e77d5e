"""Job files: what they say, and how they are read."""

from batchrun.durations import parse_duration_s
from batchrun.jobspec.checks import CONTENT_KEYS, content_template, find_problems
from batchrun.jobspec.loading import input_files, is_openai_batch_file, load_job_file
from batchrun.jobspec.model import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    OUTPUT_COLUMNS,
    Endpoint,
    InputFormat,
    InputSpec,
    JobFile,
    JobSpec,
    OutputSpec,
    Weight,
)
from batchrun.jobspec.quantities import FailureLimit
from batchrun.jobspec.templating import JobEnvironment, make_environment

__all__ = [
    "CONTENT_KEYS",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "OUTPUT_COLUMNS",
    "Endpoint",
    "FailureLimit",
    "InputFormat",
    "InputSpec",
    "JobEnvironment",
    "JobFile",
    "JobSpec",
    "OutputSpec",
    "Weight",
    "content_template",
    "find_problems",
    "input_files",
    "is_openai_batch_file",
    "load_job_file",
    "make_environment",
    "parse_duration_s",
]
