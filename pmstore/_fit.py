"""What estimators of scikit-learn's gain by a store, so that each family adds its algorithm and nothing else."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from pmstore import _sklearn
from pmstore._errors import FingerprintMismatchError
from pmstore._estimators import StoreOrPath, forget
from pmstore._fingerprint import (
    Fingerprint,
    describe,
    describe_data,
    describe_environment,
    describe_parameters,
    describe_weights,
)
from pmstore._mapping import Group
from pmstore._resumable import Field, Resumable, State, check_commit_every
from pmstore._store import Store

__all__ = ["Fit", "InStore"]


# scikit-learn compares parameters by it: a store is the same store whatever it holds.
_sklearn.hash_as(Store, lambda store: (store.path,))
_sklearn.hash_as(Group, lambda group: (group.store.path, group.name))


class _Shown:
    """An open store among the parameters that are printed; its own repr is the tree of all that it holds."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<pmstore.Store {self._path!r}>"


class Fit(Resumable):
    """The fit of an estimator: the algorithm that runs in the store.

    Its generator, `random_state`, is made of the estimator's ``random_state``; for None a seed is drawn once, and kept
    as the field ``seed``. Where the estimator has no such parameter, neither of them is kept.

    Parameters
    ----------
    estimator : InStore
        Its parameters are checked already.
    X : ndarray or sparse matrix
    weights : ndarray, optional
        Sample weights, if some were given.
    threads : int
        OpenMP threads that the fit will use.
    """

    _call = "fit()"

    def __init__(self, estimator: Any, X: Any, weights: Any = None, *, threads: int) -> None:
        self.estimator = estimator
        parameters = estimator.get_params(deep=False)
        self._given: Fingerprint = {
            "estimator": self._described(),
            **describe_data(X),
            **describe_weights(weights),
            **describe_parameters(parameters),
            **_sklearn.versions(),
            **describe_environment(threads, _sklearn.libraries()),
        }
        self._seed = -1
        self._draws = "random_state" in parameters
        given = parameters.get("random_state", 0)
        if given is None:
            self._seed = int(_sklearn.check_random_state(None).randint(np.iinfo(np.int32).max))
            given = self._seed
        self.random_state: np.random.RandomState = _sklearn.check_random_state(given)

    @property
    def title(self) -> str:
        return type(self.estimator).__name__

    def fingerprint(self) -> Fingerprint:
        """Data, parameters, versions, threads."""
        return self._given

    def _whole_fingerprint(self) -> Fingerprint:
        # max_iter and the runs are among the parameters
        return {key: describe(value) for key, value in self.fingerprint().items()}

    def changed(self, name: str) -> FingerprintMismatchError:
        """The error that says that somebody changed what a fit left, where the table of fields can't tell."""
        return FingerprintMismatchError(
            f"the fit {self.slot_name_!r} is not as it was left: what it has as {name!r} can't be. "
            "Forget the fit with reset()."
        )

    def fields(self) -> Iterable[Field]:
        """The generator and the seed that it was made from (-1: from the parameter)."""
        if not self._draws:
            return []
        return [Field("random_state", generator=self.random_state), Field("seed", dtype=np.int64)]

    def start(self) -> None:
        if self._draws and self.state.run == 0:
            self.state.seed = self._seed


class InStore:
    """Comes before scikit-learn's class among the bases of an estimator, whose ``__init__`` sets `store`, `name` and
    `commit_every`.

    Attributes
    ----------
    resumed_from_run_, resumed_from_iter_ : int
        The run that ``fit`` found in the store, and how many iterations of it were done.
    """

    store: StoreOrPath | None
    name: str | None
    commit_every: float
    _slot_name: str | None

    def _fit_in_store(self, fit: Fit) -> State:
        """Run the fit, or what is left of it; the state is what it leaves."""
        try:
            state = fit.run(self.store, self.name, commit_every=self.commit_every)
        finally:
            self._slot_name = fit.slot_name_
        self.resumed_from_run_, self.resumed_from_iter_ = fit.resumed_from_run_, fit.resumed_from_iter_
        return state

    def _started_afresh(self) -> None:
        """For a fit without a store, which is scikit-learn's own."""
        check_commit_every(self.commit_every)
        self.resumed_from_run_ = self.resumed_from_iter_ = 0

    def reset(self) -> Any:
        """Forget the fit in the store, so that the next ``fit`` starts afresh.

        With ``name=None`` that is the fit that this estimator last worked on.

        Returns
        -------
        object
            The estimator; its fitted attributes stay.
        """
        if self.store is None:
            raise ValueError("reset() needs a store to forget the fit in, and store=None")
        name = getattr(self, "_slot_name", None) if self.name is None else self.name
        if name is None:
            raise ValueError("with name=None, reset() forgets what this estimator last worked on: call fit first")
        forget(self.store, name)
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters.

        Parameters
        ----------
        deep : bool, default=True
            As in scikit-learn.

        Returns
        -------
        dict
        """
        parameters: dict[str, Any] = super().get_params(deep)  # type: ignore[misc]
        if isinstance(self.store, Store) and _sklearn.is_being_shown():
            parameters["store"] = _Shown(self.store.path)
        return parameters

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[misc]
        if isinstance(state.get("store"), Store):  # a copy keeps it, a pickle can't
            state["store"] = os.fspath(state["store"].path)
        return state


CONSTRAINTS: dict[str, list[Any]] = {
    "store": [Store, str, os.PathLike, None],
    "name": [str, None],
    "commit_every": [_sklearn.POSITIVE],
}
"""Of the parameters that every estimator gains, for ``_parameter_constraints``."""
