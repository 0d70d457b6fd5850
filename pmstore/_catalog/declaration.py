"""The store's record of a derived array: its declaration and its stamp. Also the names of functions.

The declaration is under the array's name. The stamp and the value, if it is stored, are under keys of their own (see
names.py). All of them are encoded as values are, and verified when they are read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pmstore._catalog.names import check_name
from pmstore._display import name_text
from pmstore._errors import MALFORMED, CorruptStoreError
from pmstore._values.values import decode, encode

__all__ = ["Declaration", "Stamp", "path_of_function"]

Tolerance = tuple[float, float]
Verify = str | Tolerance | None  # "hash", or relative and absolute tolerance

POLICIES = ("auto", "recompute", "store")


class Declaration(NamedTuple):
    """How a derived array is computed, and how it is kept.

    function: "module:qualified name". inputs: full names in the store; None for inputs that the program gives.
    arguments: the names of keyword arguments. decision: with policy "auto", the chosen policy, and the seconds to
    recompute and to write (None: not measured); None as long as there is no decision.
    """

    function: str
    version: int | str
    inputs: tuple[str | None, ...]
    arguments: tuple[str, ...]
    policy: str
    verify: Verify
    decision: tuple[str, float, float | None] | None

    def __str__(self) -> str:
        return name_text(f"derived by {self.function:.200} version {self.version!s:.80}")  # a terminal may show it

    def encode(self) -> bytes:
        """The bytes that the store keeps."""
        return encode(list(self))

    @classmethod
    def decode(cls, encoded: bytes) -> Declaration:
        """Decode bytes of the store. Raises CorruptStoreError if they are no declaration."""
        return _decoded(cls, encoded, "declaration")

    def _valid(self) -> bool:
        for name in self.inputs:
            if name is not None:
                check_name(name)
        return (
            type(self.function) is str
            and type(self.version) in (int, str)
            and type(self.inputs) is tuple
            and type(self.arguments) is tuple
            and all(type(name) is str for name in self.arguments)
            and self.policy in POLICIES
            and (self.verify in (None, "hash") or (type(self.verify) is tuple and _floats(self.verify, 2)))
            and (self.decision is None or (type(self.decision) is tuple and _decided(*self.decision)))
        )

    def differences(self, wanted: Declaration) -> list[str]:
        """The differences that make the value out of date, as ``what: stored ≠ wanted`` each."""
        return [
            f"{what}: {_text(here)} ≠ {_text(there)}"
            for what, here, there in zip(self._fields[:4], self[:4], wanted[:4])
            if here != there
        ]


class Stamp(NamedTuple):
    """The inputs that a value was computed from, and a description of the value.

    inputs: the digest of function, version and inputs. contents: the hash of the value, or None. summary: see
    _derived/verify.py.
    """

    inputs: int
    contents: int | None
    summary: tuple[float, ...] | None

    def encode(self) -> bytes:
        """The bytes that the store keeps."""
        return encode(list(self))

    @classmethod
    def decode(cls, encoded: bytes) -> Stamp:
        """Decode bytes of the store. Raises CorruptStoreError if they are no stamp."""
        return _decoded(cls, encoded, "stamp")

    def _valid(self) -> bool:
        summary = self.summary
        return (
            type(self.inputs) is int
            and type(self.contents) in (int, type(None))
            and (summary is None or (type(summary) is tuple and _floats(summary, len(summary))))
        )


Part = TypeVar("Part", Declaration, Stamp)


def _decoded(kind: type[Part], encoded: bytes, what: str) -> Part:
    """Decode bytes of the store. Raises CorruptStoreError if they don't fit the type."""
    try:
        found = kind(*decode(encoded))
        if not found._valid():
            raise ValueError("its parts")
    except CorruptStoreError:
        raise
    except MALFORMED as error:
        raise CorruptStoreError(f"a damaged {what} of a derived array: {error}") from error
    return found


def _decided(policy: Any, recompute: Any, write: Any) -> bool:
    return policy in POLICIES[1:] and type(recompute) is float and type(write) in (float, type(None))


def _floats(values: tuple[Any, ...], count: int) -> bool:
    return len(values) == count and all(type(value) is float for value in values)


def _text(value: Any) -> str:
    if type(value) is not tuple:
        return str(value)
    return f"({', '.join('(given by the program)' if part is None else part for part in value)})"


def path_of_function(function: Callable[..., Any]) -> str:
    """ "module:qualified name", by which the store knows the function.

    A function of the program's main file gets the name that it has when the file is imported: the module after
    ``python -m``, or the file's base name. Raises TypeError for functions that can't be found again by a name: lambdas,
    functions inside others, methods of an object, partials.
    """
    if not callable(function):
        raise TypeError(f"function is what gives the array, called with its inputs, not {type(function).__name__}")
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    text = f"{function!r:.100} can't be the function of a derived array"
    if isinstance(function, np.ufunc) and getattr(np, function.__name__, None) is function:
        module, name = "numpy", function.__name__  # before numpy 2.2, a ufunc has no module
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(f"{text}, as it has no import path: define a function that calls it in a module")
    if "<" in name:
        raise TypeError(
            f"{text}, as nothing can import it by a name: define it in a module, not inside another function, and pass "
            "what it refers to as inputs or kwargs"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found != function:
        raise TypeError(f"{text}, as {module}:{name} is something else, or an object's method: define a plain function")
    in_main = module in ("__main__", "__mp_main__")  # the latter where multiprocessing has spawned the process
    return f"{_main() if in_main else module}:{name}"


def _main() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return os.path.splitext(os.path.basename(file))[0] if file else "__main__"
