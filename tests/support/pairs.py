"""Parameters of tests in pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

MEDIA = [pytest.param(name, id=name) for name in ("memory", "file")]
"""Values of the fixture `medium`, which the test names in ``indirect``."""


def named(functions: Iterable[Callable[..., Any]]) -> list[Any]:
    """A pytest.param of each function, with its name."""
    return [pytest.param(function, id=function.__name__) for function in functions]


def labelled(values: Mapping[str, Any]) -> list[Any]:
    """A pytest.param of each value, with its key."""
    return [pytest.param(value, id=key) for key, value in values.items()]


def half(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Each of some pytest.param together with each of others: half of them in `make test`, all in `make long`."""
    return [
        pytest.param(
            *row.values,
            *column.values,
            id=f"{row.id}-{column.id}",
            marks=[pytest.mark.long] if (n + n // 8 + m) % 2 else [],
        )
        for (n, row), (m, column) in itertools.product(enumerate(rows), enumerate(columns))
    ]
