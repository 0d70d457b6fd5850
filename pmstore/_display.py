"""The display of stores and groups: a bounded tree of names, shapes, dtypes and sizes, as text and as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from pmstore._errors import Error

MAX_LINES = 60
MAX_NAME = 48
MAX_DTYPE = 40
MAX_VALUE = 40

_ADDRESS = re.compile(
    r"""('[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""  # a str, which stays as it is
    r"|(Generator\(\w+\)) at 0x[0-9A-F]+"
)

# name, kind ("array", "value", "list", "object" or "derived"), shape, dtype, bytes, name of the type, and text: of a
# small value; "of" and the maxshape of an array that grows; or ""
Row = tuple[str, str, "tuple[int, ...] | None", Any, int, str, str]


class Shown(Protocol):
    """The interface of a Store or a Group that this module uses."""

    def __len__(self) -> int: ...

    def _rows(self) -> Iterator[Row]: ...


class Line(NamedTuple):
    """One line of the tree."""

    guide: str  # the branches drawn to the left of the label
    label: str
    row: Row | None  # None: a group
    path: str = ""

    @property
    def depth(self) -> int:
        """The number of groups that the line is in."""
        return len(self.guide) // 3 - 1


@dataclass
class _Node:
    row: Row | None = None
    children: dict[str, _Node] = field(default_factory=dict)


def title_text(mapping: Shown) -> str:
    """A Store or a Group on one line, for ``repr``."""
    return f"<{_look_at(mapping, 0)[0]}>"


def tree_text(mapping: Shown) -> str:
    """The tree of a Store or a Group, for ``str``: at most MAX_LINES lines of names, then the number of further
    ones."""
    title, lines, more = _look_at(mapping)
    notes = notes_of(mapping)
    rows = ((line.guide + line.label, *columns(line.row, notes.get(line.path, ""))) for line in lines)
    text = [f"<{title}>", *aligned(rows)]
    if more:
        text.append(f"… and {more:,} more")
    return "\n".join(text)


def tree_html(mapping: Shown) -> str:
    """The tree of a Store or a Group, for ``_repr_html_``; everything that comes from the store is escaped."""
    import html

    title, lines, more = _look_at(mapping)
    notes = notes_of(mapping)
    rows = []
    for line in lines:
        cells = [f'<td style="text-align:left;padding-left:{0.5 + 1.5 * line.depth}em">{html.escape(line.label)}</td>']
        shown = columns(line.row, notes.get(line.path, ""))
        cells += [f'<td style="text-align:left">{html.escape(text)}</td>' for text in shown]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    if more:
        rows.append(f'<tr><td colspan="3">… and {more:,} more</td></tr>')
    text = f"<div><b>{html.escape(title)}</b></div>"
    if rows:
        names = ("name", "type", "size", "attributes") if notes else ("name", "type", "size")
        header = "".join(f'<th style="text-align:left">{name}</th>' for name in names)
        text += f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return text


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines with straight columns; a row may lack the last cells."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]


def type_text(row: Row) -> str:
    """Type of a row in words: shape and dtype of an array, otherwise the name of its type."""
    _, kind, shape, dtype, _, type_name, value = row
    most = f" {value}" if kind == "array" and value else ""  # the maxshape of an array that grows
    text = "" if shape is None or kind == "list" else f"{shape}{most} {_cut(str(dtype), MAX_DTYPE)}"
    if kind == "array":
        return text
    return f"{text} {type_name}" if text else type_name


def notes_of(mapping: Any) -> dict[str, str]:
    """The attributes of a Store or a Group in a few words each, by name."""
    try:
        found: dict[str, str] = {} if getattr(mapping, "closed", False) else mapping._brief()
    except (AttributeError, Error):
        return {}
    return found


def columns(row: Row | None, note: str = "") -> tuple[str, ...]:
    """Type, with a small value, and size of a row, and a note. A list has no size here, because its elements aren't
    read. A group has neither."""
    if note:
        kind, size = (*columns(row), "", "")[:2]
        return kind, size, note
    if row is None:
        return ()
    text = f"{type_text(row)} = {row[6]}" if row[6] and row[1] != "array" else type_text(row)
    return (text,) if row[1] == "list" else (text, size_text(row[4]))


def size_text(nbytes: int) -> str:
    """A number of bytes, in the unit that needs at most four digits: ``'62.7 KiB'``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def full_text(value: Any, show: Callable[[Any], str] = repr) -> str:
    """``repr(value)``, or what `show` gives, without the addresses of generators in it. Python gives none of an int
    with thousands of digits, which is in hexadecimal digits then, and numpy none of a time without a unit."""
    try:
        text = show(value)
        return _ADDRESS.sub(lambda found: found[1] or found[2], text) if "Generator(" in text else text
    except ValueError as error:
        if isinstance(value, int):
            return hex(value)
        why = "an int of too many digits" if "digits" in str(error) else "a time without a unit"
        return f"{type(value).__name__} with {why}"


def value_text(value: Any, most: int = MAX_VALUE) -> str:
    """A value on one line of at most so many characters, which can't affect a terminal."""
    if isinstance(value, (str, bytes)):
        value = value[: most + 1]
    text = full_text(value, str if isinstance(value, np.generic) and not isinstance(value, (str, bytes)) else repr)
    return _cut(name_text(" ".join(text.split())), most)


def count_text(count: int, noun: str) -> str:
    """A number of things: ``'1 name'``, ``'1,234 names'``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def status_text(worked: str, damaged: str, failed: str) -> str:
    """The last part of a command's help: its exit statuses. damaged: "" for a command that has no such status."""
    texts = {0: worked, 1: damaged, 2: f"{failed}, or the arguments are wrong"}
    return "exit status:\n" + "".join(f"  {status}  {text}\n" for status, text in texts.items() if text)


def name_text(name: str) -> str:
    """A name that can't affect a terminal: characters that aren't printable are escaped."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def lines_text(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(name_text, text.split("\n")))


def tree_lines(rows: Iterator[Row]) -> Iterator[Line]:
    """Lines of the tree of the rows, each group before its contents."""
    root = _Node()
    for row in rows:
        node = root
        for part in row[0].split("/"):
            node = node.children.setdefault(part, _Node())
        node.row = row
    return _walk(root, "", "")


def _walk(node: _Node, guide: str, path: str) -> Iterator[Line]:
    last = len(node.children) - 1
    for i, (part, child) in enumerate(node.children.items()):
        label = _cut(name_text(part), MAX_NAME)
        label = label if child.row else label + "/"
        yield Line(guide + ("└─ " if i == last else "├─ "), label, child.row, path + part)
        yield from _walk(child, guide + ("   " if i == last else "│  "), f"{path}{part}/")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _look_at(mapping: Any, most: int = MAX_LINES) -> tuple[str, list[Line], int]:
    """Title, lines, and the number of further names. Never raises the errors of a store: a repr must not raise."""
    store = getattr(mapping, "store", mapping)
    group = f" {mapping.name!r} of" if mapping is not store else ""
    about = f"pmstore.{type(mapping).__name__}{group} {str(store.path)!r}"
    if store.closed:
        return f"closed {about}", [], 0
    times = store.openings
    about += f" ({store.media}, mode {store.mode}{f', open {times:,} times' if times > 1 else ''})"
    try:
        count = len(mapping)
        lines = list(islice(tree_lines(islice(mapping._rows(), most)), most))
    except Error as error:
        return f"{about}: {error}", [], 0
    more = count - sum(line.row is not None for line in lines)
    return f"{about}: {count_text(count, 'name')}", lines, more
