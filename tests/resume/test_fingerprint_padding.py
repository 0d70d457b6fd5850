"""Hashes are of values: the padding of elements has what the memory had before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("xxhash")

from pmstore._resume.fingerprint import hash_array
from pmstore.scale._messages import Tag, digest_of

PADDED = {
    "longdouble": np.longdouble,
    "clongdouble": np.clongdouble,
    "swapped": np.dtype(np.longdouble).newbyteorder(),
    "swapped complex": np.dtype(np.clongdouble).newbyteorder(),
    "gaps": np.dtype([("n", "i1"), ("x", "f8")], align=True),
    "complex": np.dtype([("n", "i1"), ("z", "c16"), ("g", np.clongdouble)], align=True),
    "nested": np.dtype([("a", np.dtype([("n", "i1"), ("x", "f8", (2,))], align=True), (3,)), ("g", np.longdouble)]),
}


def made(dtype: Any, junk: int) -> Any:
    """The same values for each junk, in memory that had other bytes before."""
    dtype = np.dtype(dtype)
    array = np.full(40 * dtype.itemsize, junk, np.uint8).view(dtype)
    fill(array)
    return array


def fill(array: Any) -> None:
    if array.dtype.names:
        for name in array.dtype.names:
            fill(array[name])
    else:
        array[...] = np.arange(array.size).reshape(array.shape) % 100 / 8


@pytest.mark.parametrize("kind", PADDED)
def test_padding_is_not_hashed(kind: str) -> None:
    one, other = made(PADDED[kind], 0), made(PADDED[kind], 171)
    changed = one.copy()
    changed[7:8] = one[8:9]
    tag = Tag("run", 1, 0)
    assert hash_array(one) == hash_array(other) == hash_array(other.copy()) != hash_array(changed)
    for few in (lambda a: a[:20:2], lambda a: a.reshape(5, 8).T, lambda a: a.reshape(2, 4, 5).transpose(1, 0, 2)):
        assert hash_array(few(one)) == hash_array(few(other))
    for count in (5, 40):
        repeated = [np.resize(array, count * 40) for array in (one, other)]
        first, second = (digest_of(0, tag, {"x": array}) for array in repeated)
        assert first == second
    assert digest_of(0, tag, {"x": one}) != digest_of(0, tag, {"x": changed})


def test_each_byte_of_a_value_counts() -> None:
    one = np.longdouble(1) + np.finfo(np.longdouble).eps
    assert hash_array(np.array([one])) != hash_array(np.array([np.longdouble(1)]))
    assert hash_array(np.array([-one])) != hash_array(np.array([one]))


def test_hashes_of_values_without_padding_stay() -> None:
    """Stores have them."""
    assert hash_array(np.arange(5.0)) == "9e1befeb37478d2318e42156bcefc9ce"
    assert hash_array(np.zeros((2, 3), [("a", "u1"), ("b", "<f4")])) == "3fe570f468069182793986593fa9f4a5"
    assert digest_of(3, Tag("r", 1, 2), {"x": np.arange(4, dtype="<i2")}) == "710a7e6134135356c7c02b8e96446157"
