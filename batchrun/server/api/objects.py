"""OpenAI's objects, as views of what the store holds. Every key is always there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from batchrun.store.batches import BatchRecord
from batchrun.store.files import FileRecord
from batchrun.store.jobs import Counts
from batchrun.types import JobState

JsonObject = dict[str, object]

BATCH_STATUSES = {
    JobState.VALIDATING: "validating",
    JobState.RUNNING: "in_progress",
    JobState.PAUSED: "in_progress",
    JobState.FINALIZING: "finalizing",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLING: "cancelling",
    JobState.CANCELLED: "cancelled",
    JobState.EXPIRED: "expired",
}


def list_object(items: Sequence[JsonObject], *, has_more: bool) -> JsonObject:
    """A page of a list."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def file_object(file: FileRecord) -> JsonObject:
    """A file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_at),
        "expires_at": _instant(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def status_of(batch: BatchRecord) -> str:
    """OpenAI's word for the job's state. What it has no word for looks as if nothing happened: a
    pause, and the time it takes to write what an expired batch has."""
    job = batch.job
    is_expiring = job.state is JobState.FINALIZING and job.ends_as is JobState.EXPIRED
    if is_expiring or job.state is JobState.PAUSED:
        return "validating" if job.started_at is None else "in_progress"
    return BATCH_STATUSES[job.state]


def batch_object(batch: BatchRecord, counts: Counts) -> JsonObject:
    """A batch; `counts` are those of its job now."""
    job = batch.job

    def ended(state: JobState) -> int | None:
        return _instant(job.finished_at) if job.state is state else None

    return {
        "id": job.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status_of(batch),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(job.created_at),
        "in_progress_at": _instant(job.started_at),
        "expires_at": _instant(job.expires_at),
        "finalizing_at": _instant(job.finalizing_at),
        **_endings(ended),
        "cancelling_at": _instant(job.cancelling_at),
        "request_counts": {
            "total": job.num_rows,
            "completed": counts.num_completed,
            "failed": counts.num_failed,
        },
        "usage": _usage(batch, counts),
        "metadata": None if batch.metadata is None else dict(batch.metadata),
    }


def _endings(ended: Callable[[JobState], int | None]) -> JsonObject:
    return {
        "completed_at": ended(JobState.COMPLETED),
        "failed_at": ended(JobState.FAILED),
        "expired_at": ended(JobState.EXPIRED),
        "cancelled_at": ended(JobState.CANCELLED),
    }


def _errors(batch: BatchRecord) -> JsonObject | None:
    if batch.errors is None:
        return None
    return {"object": "list", "data": [asdict(error) for error in batch.errors]}


def _usage(batch: BatchRecord, counts: Counts) -> JsonObject:
    return {
        "input_tokens": counts.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.num_cached_tokens},
        "output_tokens": counts.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": batch.num_reasoning_tokens or 0},
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
    }


def _instant(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s)
