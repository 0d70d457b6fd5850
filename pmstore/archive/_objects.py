"""The places where an archive keeps its objects: a folder of this machine, or any target that fsspec reaches."""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import Any

from pmstore.archive._fsspec import FsspecPlace
from pmstore.archive._local import LocalPlace
from pmstore.archive._place import Buffer, MissingObjectError, ObjectExistsError, Place, ShortObjectError
from pmstore.archive._retrying import RecoveredError, Retrying

__all__ = [
    "Buffer",
    "FsspecPlace",
    "LocalPlace",
    "MissingObjectError",
    "ObjectExistsError",
    "Place",
    "RecoveredError",
    "Retrying",
    "ShortObjectError",
    "place_of",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAINED = re.compile(r"[A-Za-z0-9+.-]+::.*://|[A-Za-z0-9+.-]+://.*::", re.DOTALL)


def place_of(url: str | bytes | os.PathLike[Any], **storage_options: Any) -> Place:
    """The place of a path or a URL. Nothing is created and nothing is connected to before the first call.

    Parameters
    ----------
    url : str, bytes or path-like
        A path, ``file://…``, or the URL of any target that fsspec knows, such as ``s3://bucket/prefix``.
    **storage_options
        Handed to fsspec. A local folder takes none.

    Raises
    ------
    ImportError
        fsspec, or the package behind it that knows such URLs, is not installed.
    ValueError
        It is no path and no URL, or a chained URL (``a::b``), whose writes would not be durable.
    """
    text = os.fsdecode(url)
    if not text or "\0" in text:
        raise ValueError(f"not a path or URL: {text!r}")
    match = _URL.match(text) if isinstance(url, str) else None
    if isinstance(url, str) and _CHAINED.match(text):
        raise ValueError(f"writes through a chained URL are not durable; name the target itself: {text!r:.20}…")
    if match is None or match[1].lower() in ("file", "local"):
        if storage_options:
            raise TypeError(f"a local folder takes no options: {', '.join(sorted(storage_options))}")
        return LocalPlace(text if match is None else _local_path(text))
    return FsspecPlace(text, **storage_options)


def _local_path(url: str) -> str:
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "local" + "host") or not path:
        raise ValueError(f"{url!r} does not name a folder of this machine; file:///path does")
    return slash + urllib.parse.unquote(path)
