"""`Store.drain`: checks the arguments, and begins a drain."""

from __future__ import annotations

import math
import numbers
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pmstore._store.lineage import lineage_of, parent_of
from pmstore.archive._codecs import codecs_of
from pmstore.archive._drain import Drain, Trouble
from pmstore.archive._objects import Place, Retrying, place_of
from pmstore.archive._retention import Keep
from pmstore.archive._sizes import count_of, size_of
from pmstore.archive._steps import Options, Steps

if TYPE_CHECKING:
    from pmstore._store.store import Store

__all__ = ["begin", "places_of", "urls_of"]

_PATIENCE = 30.0  # seconds that a place may be away when a drain begins: the caller waits


def urls_of(url: Any) -> list[Any]:
    """A path or URL, or several of them, as a list."""
    if isinstance(url, (str, bytes, os.PathLike)):
        return [url]
    if not isinstance(url, Iterable):
        raise TypeError(f"an archive is a path, a URL, or a list of these, not {url!r:.80}")
    return list(url)


def places_of(url: Any, storage_options: Mapping[str, Any] | None) -> list[Place]:
    """The places of a path or URL, or of several. Raises TypeError, ValueError, ImportError."""
    urls = urls_of(url)
    if not urls:
        raise ValueError("an archive needs a path or a URL")
    if not isinstance(storage_options, Mapping | None):
        raise TypeError(f"storage_options is a dict of fsspec's options, not {storage_options!r:.80}")
    options = storage_options or {}
    return [place_of(one, **(options if "://" in os.fsdecode(one) else {})) for one in urls]


def begin(
    store: Store,
    fd: int,
    url: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    every: int,
    keep: Any,
    codec: Any,
    part_size: int | str,
    queue_size: int | str,
    on_error: str,
    mtbf: float | None,
    storage_options: Mapping[str, Any] | None,
) -> Drain:
    """See `Store.drain`. fd: of the store's file; it is the drain's when `Drain.begin` is called."""
    if on_error not in ("warn", "raise"):
        raise ValueError(f"on_error is 'warn' or 'raise', not {on_error!r}")
    if mtbf is not None and not (isinstance(mtbf, numbers.Real) and mtbf > 0):
        kind = ValueError if isinstance(mtbf, numbers.Real) else TypeError
        raise kind(f"mtbf is a number of seconds, more than 0, not {mtbf!r:.80}")
    options = Options(
        every=count_of(every, "every is a number of commits"),
        keep=Keep.of(keep),
        codec=codecs_of(codec),
        part_size=size_of(part_size, "part_size"),
        queue_size=size_of(queue_size, "queue_size"),
        raises=on_error == "raise",
        mtbf=None if mtbf is None else float(mtbf),
    )
    trouble = Trouble(options.raises)
    places = [
        Retrying(place, trouble.stop, trouble.tell, patience=_PATIENCE) for place in places_of(url, storage_options)
    ]
    named = [place.url if "://" in place.url else os.path.realpath(place.url) for place in places]
    if len(set(named)) < len(named):
        raise ValueError(f"each place of an archive is another one, not {', '.join(named)}")
    core = store._catalog.core
    about = {
        "id": secrets.token_hex(16),
        "lineage": lineage_of(core),
        "created": time.time(),
        "parent": parent_of(core),
    }
    steps = Steps(fd, places, about, options)
    for place in places:
        place.patience = math.inf
    return Drain(store, steps, trouble)
