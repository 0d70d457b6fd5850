"""`shelf`: a store whose values are attributes, as in PyMM."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

from pmstore._errors import TransactionError, UnknownNameError
from pmstore._locks import Transaction
from pmstore._store.entrance import open as open_store
from pmstore._store.store import Store

__all__ = ["Shelf", "shelf"]


_ELSEWHERE = {  # verbs of PyMM that a shelf lacks
    "close": "s.store.close(), or a with statement",
    "get_item_names": "s.items",
    "inspect": "print(s.store)",
    "used": "s.store.stats()",
}


class Shelf:
    """A store whose values are attributes: ``s.x = array``, ``s.x += 1``, ``del s.x``. Made by `shelf`.

    The verbs are those of PyMM (HPEC 2022). Leaving a with statement commits and closes, or rolls back and closes if an
    exception is passing. ``s.store[name]`` also has the names that are attributes of this class, or begin with ``_``.

    Attributes
    ----------
    store : Store
        The store itself.
    """

    store: Store
    _transactions: list[Transaction[Store]]

    def __init__(self, store: Store) -> None:
        vars(self).update(store=store, _transactions=[])

    def __getattr__(self, name: str) -> Any:
        """The live array under a name, or a copy of another value. Raises AttributeError, ClosedStoreError."""
        try:
            if not name.startswith("_"):
                return self.store[name]
        except UnknownNameError as error:
            hint = f"; instead: {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{error}{hint}", name=name, obj=self) from None
        raise AttributeError(f"a shelf has no attribute {name!r}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Copies a value into the store, like ``store[name] = value``, with the same errors."""
        self._require_free(name)
        self.store[name] = value

    def __delattr__(self, name: str) -> None:
        """Deletes a name. An array that is still referenced is detached, and keeps its bytes."""
        self._require_free(name)
        if name not in self.store:
            raise AttributeError(f"a shelf has no attribute {name!r}", name=name, obj=self)
        self.erase(name)

    def _require_free(self, name: str) -> None:
        if name.startswith("_") or name == "store" or hasattr(Shelf, name):
            raise AttributeError(f"{name!r} is of the shelf itself: use another name, or s.store[{name!r}]")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(() if self.store.closed else self.items)]

    def __repr__(self) -> str:
        if self.store.closed:
            return f"<closed shelf {self.store.path!r}>"
        return f"<shelf {self.store.path!r}: {', '.join(self.items) or 'no names'}>"

    @property
    def items(self) -> list[str]:
        """The names, as a list."""
        return list(self.store)

    def erase(self, name: str) -> None:
        """Delete a name. Raises UnknownNameError (a KeyError) if there is none."""
        del self.store[name]

    def persist(self) -> None:
        """Make all changes since the last commit durable together. Raises the errors of `Store.commit`."""
        self._require_ended("persist()", "tx_end() commits")
        self.store.commit()

    def transaction(self) -> Transaction[Store]:
        """A transaction for a with statement: it commits, or rolls back if an exception leaves it."""
        return self.store.transaction()

    def tx_begin(self, variables: Any = None) -> None:
        """Begin a transaction, as `transaction` does. A second one, inside it, joins it.

        PyMM takes the variables that the transaction changes. Here it includes all changes, whatever is listed.
        """
        transaction = self.transaction()
        transaction.__enter__()
        self._transactions.append(transaction)

    def tx_end(self) -> None:
        """End the transaction that `tx_begin` began last; the outermost one commits."""
        if not self._transactions:
            raise TransactionError("no transaction of this shelf has begun: tx_begin() begins one")
        self._transactions.pop().__exit__(None, None, None)

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._require_ended("the end of the with statement", "call s.tx_end(), and then s.store.close()")
        self.store.__exit__(kind, error, at)

    def _require_ended(self, what: str, instead: str) -> None:
        """Raise TransactionError inside a transaction of this thread that `tx_begin` began."""
        if self._transactions and not self.store.closed and self.store.in_transaction:
            raise TransactionError(f"{what} comes between tx_begin() and tx_end(): {instead}")


def shelf(path: str | os.PathLike[str], mode: Any = "a", **options: Any) -> Shelf:
    """Open a store as a `Shelf`, or create it. The arguments and errors are those of `open`."""
    return Shelf(open_store(path, mode, **options))
