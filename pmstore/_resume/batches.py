"""Batches of data from any source, one after the other, and recognizing them again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._errors import FingerprintMismatchError
from pmstore._resume.fingerprint import describe

__all__ = ["Batch", "Batches"]

_END = object()


class Batch:
    """The arguments of one call of ``partial_fit``.

    Parameters
    ----------
    given : dict, tuple or array-like
        A dict of arguments by name; or the tuple X, y, sample_weight; or X.
    """

    def __init__(self, given: Any) -> None:
        self.positional: tuple[Any, ...] = (given,)
        self.named: dict[str, Any] = {}
        if isinstance(given, dict) and not hasattr(given, "tocsr"):  # scipy's dok_matrix is a dict
            self.positional, self.named = (), given
        elif isinstance(given, tuple):
            if not 1 <= len(given) <= 3:
                raise TypeError(f"a batch is X, (X, y), (X, y, sample_weight) or a dict, not a tuple of {len(given)}")
            self.positional = given[:2]
            self.named = dict(zip(("sample_weight",), given[2:]))

    @cached_property
    def hash(self) -> int:
        """A 64-bit hash of the whole batch."""
        named = dict(zip(("X", "y"), self.positional), **self.named)
        text = json.dumps({name: _describe(value) for name, value in named.items()}, sort_keys=True)
        import hashlib

        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _describe(value: Any) -> Any:
    return describe(np.asarray(value) if isinstance(value, list) else value)


class Batches:
    """All batches of all epochs.

    Parameters
    ----------
    source : sequence, callable or iterable
        A sequence of batches; a function that returns batch i of an epoch, and None if there is none; or an iterable.
    epochs : int

    Attributes
    ----------
    epoch, index : int
        The epoch and the number of the next batch. At the end of an epoch, `index` is one more than the last batch's.
    """

    def __init__(self, source: Any, epochs: int) -> None:
        self.epoch = self.index = 0
        self._source, self._epochs = source, epochs
        table = isinstance(source, np.ndarray) and source.ndim < 3
        if table or isinstance(source, Mapping | str | bytes) or hasattr(source, "iloc") or hasattr(source, "tocsr"):
            raise TypeError(
                f"batches is to be a sequence of batches, a function or an iterable, not one {type(source)}"
            )
        self._get: Callable[[int], Any] | None = None  # returns batch i
        self.length: int | None = None
        """The number of batches in an epoch, if it is known."""
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            self.length = len(source)
            self._get = source.__getitem__
        elif callable(source) and not isinstance(source, Iterable):
            self._get = source
        elif not isinstance(source, Iterable):
            raise TypeError(f"batches is to be a sequence of batches, a function or an iterable, not {source!r}")
        elif epochs > 1 and iter(source) is source:
            raise ValueError(
                f"epochs={epochs}, and batches is an iterator, which gives every batch once: pass a sequence, a "
                "function of the batch's number, or an iterable that begins anew"
            )
        self._coming = self._from(0)
        self._next: Batch | None = None

    def peek(self) -> Batch | None:
        """The next batch; None after the last one of the last epoch."""
        while self._next is None and self.epoch < self._epochs:
            given = next(self._coming, _END)
            if given is not _END:
                self._next = Batch(given)
                break
            if self.index == 0:
                raise ValueError(f"there is no batch in epoch {self.epoch}")
            self.epoch, self.index = self.epoch + 1, 0
            self._coming = self._from(0)
        return self._next

    def take(self) -> Batch:
        """The next batch, which must exist."""
        batch = self.peek()
        assert batch is not None
        self._next = None
        self.index += 1
        return batch

    def go_to(self, epoch: int, index: int, hashes: npt.NDArray[np.uint64]) -> None:
        """Make batch `index` of an epoch the next one.

        Raises FingerprintMismatchError if earlier batches have changed. For an iterable, all earlier batches of the
        epoch are compared, otherwise only the last one.

        Parameters
        ----------
        hashes : ndarray
            The hashes of all earlier batches.
        """
        before = hashes[len(hashes) - index :].tolist()
        numbers = range(index) if self._get is None else range(index - 1, index)
        first = (
            self._next if self.epoch == self.index == 0 else None
        )  # taken from an iterator, which won't return it again
        rest = self._coming if self._get is None and epoch == 0 else self._from(numbers.start)
        if self._get is None and epoch == 0 and first is not None:
            rest = itertools.chain([first], rest)
        for number in numbers:
            given = next(rest, _END)
            batch = given if isinstance(given, Batch) else Batch(given)
            if given is _END or batch.hash != before[number]:
                now = "missing" if given is _END else "another one now"
                raise FingerprintMismatchError(
                    f"batch {number} of epoch {epoch} is {now}, and the fit in the store has learned from it already. "
                    "Pass the same batches, or choose another name."
                )
        self.epoch, self.index, self._next, self._coming = epoch, index, None, rest

    def _from(self, index: int) -> Iterator[Any]:
        """The batches of an epoch, from a given number on."""
        if self._get is None:
            return itertools.islice(self._source, index, None)
        if self.length is not None:
            return map(self._get, range(index, self.length))
        return itertools.takewhile(lambda batch: batch is not None, map(self._get, itertools.count(index)))
