"""An S3 server on loopback that tests can take away and bring back, with all that is in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from batchrun.jobs import objects
from benchmarks.deployment import free_port

BUCKET, OTHER = "bucket", "other"


class ObjectStore:
    """moto's S3 server with two buckets; what names no bucket is about the first."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.port = free_port()
        self._server: ThreadedMotoServer | None = None
        self.start()
        self._client = boto3.client("s3", **self._settings())
        for name in (BUCKET, OTHER):
            self.make_bucket(name)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "verysecret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Listen; what was there is there."""
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Answer nobody any more."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within, it does not answer."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        """Stop for good, and forget everything."""
        self._client.close()
        self.stop()

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        self._client.create_bucket(Bucket=name)

    def remove_bucket(self, name: str) -> None:
        """Remove an empty bucket."""
        self._client.delete_bucket(Bucket=name)

    def write(self, key: str, content: bytes) -> str:
        """Make an object; its URL."""
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def read(self, key: str) -> bytes:
        """The bytes of an object."""
        return bytes(self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def remove(self, key: str) -> None:
        """Remove an object."""
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all objects below a prefix."""
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [str(entry["Key"]) for entry in found.get("Contents", ())]

    def begin_upload(self, key: str) -> None:
        """Leave an upload as a kill does: begun, and never ended."""
        self._client.create_multipart_upload(Bucket=BUCKET, Key=key)

    def uploads(self) -> list[str]:
        """The keys of uploads that were begun and not ended."""
        found = self._client.list_multipart_uploads(Bucket=BUCKET)
        return [str(entry["Key"]) for entry in found.get("Uploads", ())]

    def _settings(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.url,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "verysecret",
            "region_name": "us-east-1",
        }


@contextmanager
def object_store_in_environment(patch: Any) -> Iterator[ObjectStore]:
    """An S3 server that this process and its children find; `patch` is a pytest.MonkeyPatch."""
    store = ObjectStore()
    for name, value in store.environment.items():
        patch.setenv(name, value)
    try:
        yield store
    finally:
        store.close()
        objects.file_system.cache_clear()
