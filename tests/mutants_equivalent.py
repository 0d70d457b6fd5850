"""Mutants that nobody chose, and that no test could notice: the line where they stand, and why."""

from __future__ import annotations

from typing import NamedTuple


class Equivalent(NamedTuple):
    """line: of the file, without the spaces before it; where a statement has several, the first one. new: a part of
    what it becomes, with single spaces, if only this change of the line is none.
    """

    file: str
    line: str
    why: str
    new: str = ""


EQUIVALENT: list[Equivalent] = []
