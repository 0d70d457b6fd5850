"""The parts that all estimators share, so that each family adds its algorithm and nothing else.

An estimator is two classes. The first one, a subclass of `Fit`, is the algorithm. Besides what `Resumable` asks for
(`loop.py`: `step`, `max_iter` or `converged`, `finish`, `version`):

- Its `fields` know every size before `start` runs. A size that depends on the data, such as the number of
  components of an IncrementalPCA with ``n_components=None``, is computed from X in `fields`. A value whose size is not
  known by then has ``dtype=object``.
- Its `fields` and `start` call super's, its `fingerprint` adds the arguments of ``fit`` other than X.
- It draws from ``self.random_state``, never from the estimator's.
- `fitted` returns all attributes that `predict` or `transform` needs, as callbacks call them.
- A field with ``dtype=object`` can come back as any Python value, if other code changed the store. `derive` therefore
  checks such fields of a resumed fit. The estimator's ``fit`` checks them when it has loaded a finished one, as it does
  with `PCAFit.check` of `pmstore/decomposition/_incremental_pca.py`. Both raise `changed`.

The second one, a subclass of `InStore` and of scikit-learn's class, adds `CONSTRAINTS` to its
``_parameter_constraints``. Its ``fit`` checks the input, calls `_started_afresh` if the fit is scikit-learn's own and
`_fit_in_store` otherwise, sets the attributes, and calls `end_callbacks`. `pmstore/cluster/_mini_batch.py` is an
example; `pmstore/mixture/_em.py` adds to the fingerprint. `pmstore/cluster/_sharded.py` and docs/scale.md are about
``engine=``.
"""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pmstore._errors import FingerprintMismatchError
from pmstore._resume import sklearn
from pmstore._resume.callbacks import Callbacks
from pmstore._resume.fingerprint import (
    Fingerprint,
    describe,
    describe_data,
    describe_environment,
    describe_parameters,
    describe_weights,
)
from pmstore._resume.fit_group import StoreOrPath, forget, group_advice
from pmstore._resume.history import History
from pmstore._resume.loop import Field, Resumable, State, check_commit_every
from pmstore._store.mapping import Group
from pmstore._store.store import Store

__all__ = ["CONSTRAINTS", "Fit", "InStore"]


# scikit-learn compares parameters by this hash: a store is the same store whatever it contains.
sklearn.hash_as(Store, lambda store: (store.path,))
sklearn.hash_as(Group, lambda group: (group.store.path, group.name))


class _Shown:
    """An open store among printed parameters; its own repr would show all its contents."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<pmstore.Store {self._path!r}>"


class Fit(Resumable):
    """The fit of an estimator: the algorithm that runs in the store.

    Its generator, `random_state`, is made from the estimator's ``random_state``. For None, a seed is drawn once, and
    kept as the field ``seed``. If the estimator has no such parameter, neither of them is kept.

    Parameters
    ----------
    estimator : InStore
        The estimator; its parameters are checked already.
    X : ndarray or sparse matrix
    weights : ndarray, optional
        Sample weights, if there are any.
    threads : int
        The number of OpenMP threads that the fit will use.
    """

    _call = "fit()"
    callbacks: Callbacks | None = None

    def __init__(self, estimator: Any, X: Any, weights: Any = None, *, threads: int) -> None:
        self.estimator = estimator
        parameters = estimator.get_params(deep=False)
        self._given: Fingerprint = {
            "estimator": self._described(),
            **describe_data(X),
            **describe_weights(weights),
            **describe_parameters(parameters),
            **sklearn.versions(),
            **describe_environment(threads, sklearn.libraries()),
        }
        self._seed = -1
        self._draws = "random_state" in parameters
        given = parameters.get("random_state", 0)
        if given is None:
            self._seed = int(sklearn.check_random_state(None).randint(np.iinfo(np.int32).max))
            given = self._seed
        self.random_state: np.random.RandomState = sklearn.check_random_state(given)

    @property
    def title(self) -> str:
        return type(self.estimator).__name__

    def fingerprint(self) -> Fingerprint:
        """Data, parameters, versions, threads."""
        return self._given

    def _whole_fingerprint(self) -> Fingerprint:
        # max_iter and the number of runs are among the parameters
        return {key: describe(value) for key, value in self.fingerprint().items()}

    def changed(self, name: str) -> FingerprintMismatchError:
        """The error for a state that other code changed in a way that the table of fields can't detect."""
        return FingerprintMismatchError(
            f"the fit {self.slot_name_!r} was changed by other code: its entry {name!r} has an impossible value. "
            "Forget the fit with reset()."
        )

    def fields(self) -> Iterable[Field]:
        """The generator, and the seed that it was made from (-1: it came from the parameter)."""
        if not self._draws:
            return []
        return [Field("random_state", generator=self.random_state), Field("seed", dtype=np.int64)]

    @abstractmethod
    def fitted(self) -> dict[str, Any]:
        """The attributes that the estimator would have if the fit ended after this step."""

    def end_callbacks(self) -> None:
        """Tell the callbacks that the fit has ended, and that the estimator has its attributes."""
        if self.callbacks is not None:
            self.callbacks.end()

    def start(self) -> Mapping[str, float] | None:
        if self._draws and self.state.run == 0:
            self.state.seed = self._seed
        return None


class InStore(sklearn.CallbackSupportMixin):
    """A base class that comes before scikit-learn's class among the bases of an estimator. The estimator's ``__init__``
    sets `store`, `name` and `commit_every`.

    Attributes
    ----------
    resumed_from_run_, resumed_from_iter_ : int
        The run that ``fit`` found in the store, and the number of its iterations that were done.
    history_ : History
        One row for every iteration, as `pmstore.history` returns it; not after a fit that is scikit-learn's own.
    """

    is_in_store = True
    """The parameters that say where it is kept have no effect on the result."""
    store: StoreOrPath | None
    name: str | None
    commit_every: float
    history_: History
    _group_name: str | None

    def _validate_params(self) -> None:
        """scikit-learn's check of the parameters, whose error would name the private module of Store."""
        if not isinstance(self.store, (Store, str, os.PathLike, type(None))):
            raise sklearn.InvalidParameterError(
                f"The 'store' parameter of {type(self).__name__} must be a pmstore.Store, a path (str or os.PathLike) "
                f"or None. Got {self.store!r} instead.{group_advice(self.store)}"
            )
        super()._validate_params()  # type: ignore[misc]

    def _has_callbacks(self) -> bool:
        return bool(getattr(self, "_skl_callbacks", None))

    def _is_scikit_learns(self) -> bool:
        """Whether the fit is scikit-learn's own: there is no store, and no callback waits for iterations."""
        return self.store is None and not self._has_callbacks()

    def _fit_in_store(self, fit: Fit, **told: Any) -> State:
        """Run the fit, or the rest of it, and return the state. Callbacks are told of X, y and metadata."""
        if self._has_callbacks():
            fit.callbacks = Callbacks(self, fit, told)
        try:
            state = fit.run(self.store, self.name, commit_every=self.commit_every)
        finally:
            self._group_name = fit.slot_name_
        self.resumed_from_run_, self.resumed_from_iter_ = fit.resumed_from_run_, fit.resumed_from_iter_
        self.history_ = fit.history_
        return state

    def _started_afresh(self) -> None:
        """Note a new start, for a fit without a store, which is scikit-learn's own."""
        check_commit_every(self.commit_every)
        self.resumed_from_run_ = self.resumed_from_iter_ = 0
        vars(self).pop("history_", None)

    def reset(self) -> Any:
        """Forget the fit in the store, so that the next ``fit`` starts anew.

        With ``name=None``, forget the fit that this estimator worked on last.

        Returns
        -------
        object
            The estimator; its fitted attributes stay.
        """
        if self.store is None:
            raise ValueError("reset() needs a store to forget the fit in, and store=None")
        name = getattr(self, "_group_name", None) if self.name is None else self.name
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
        if isinstance(self.store, Store) and sklearn.is_being_shown():
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
        if isinstance(state.get("store"), Store):  # a copy keeps an open store, a pickle can't
            state["store"] = os.fspath(state["store"].path)
        return state


CONSTRAINTS: dict[str, list[Any]] = {
    "store": [Store, str, os.PathLike, None],
    "name": [str, None],
    "commit_every": [sklearn.POSITIVE],
}
"""The constraints of the common parameters, for ``_parameter_constraints``."""
