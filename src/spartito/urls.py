"""What the text of a path or URL says of where something lies."""

from __future__ import annotations


def is_remote(path: str) -> bool:
    """Whether a path is that of a store: ``s3://bucket/run``."""
    return "://" in path


def local_path(path: str) -> str:
    """Where a path or the URL of a store lies in this machine's file systems; "" elsewhere."""
    protocol, _, rest = path.rpartition("://")
    return rest if protocol in ("", "file", "local") else ""
