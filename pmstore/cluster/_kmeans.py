"""KMeans that survives a kill."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._estimators import Slot, StoreOrPath, check_random_state_kind, opened, restore_random_state, slot_name
from pmstore._fingerprint import (
    Fingerprint,
    describe_data,
    describe_environment,
    describe_parameters,
    describe_weights,
)
from pmstore._store import Store
from pmstore.cluster import _sklearn
from pmstore.cluster._lloyd import Data, Lloyd, check_slot

Array = npt.NDArray[Any]

logger = logging.getLogger("pmstore")

LAYOUT = 1
"""Version of what `_lloyd` puts into a slot."""


class _Shown:
    """An open store among the parameters that are printed; its own repr is the tree of all that it holds."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<pmstore.Store {self._path!r}>"


class KMeans(_sklearn.SklearnKMeans):
    """scikit-learn's KMeans, with the state of the fit in a store.

    ``fit`` commits after every iteration. The same ``fit`` again, in another process if this one was killed, goes on
    after the last commit; when the fit had finished, it loads the result. The result is the same as that of
    scikit-learn's own KMeans with the same parameters and the same number of threads, bit for bit, as far as
    scikit-learn's is the same every time: with more than two threads it adds partial sums in the order in which they
    arrive.

    Parameters
    ----------
    n_clusters, init, n_init, max_iter, tol, verbose, random_state, copy_x, algorithm
        As in :class:`sklearn.cluster.KMeans`. With a store, ``algorithm`` must be ``"lloyd"``. With
        ``random_state=None`` a seed is drawn once and kept in the store, so that ``fit`` again gives the same result;
        it is another fit only when the slot is forgotten. A ``RandomState`` counts by the state that it is in.
    store : Store, str or path-like, default=None
        The path of a store, which is opened, and made if it isn't there, for as long as ``fit`` works on it; or an
        open store, in no transaction, where every commit takes whatever else is pending along. None: scikit-learn's
        own ``fit``.

        Threads that fit with the same path at the same time share one open store. Of several processes one has it
        open, and the others wait for as long as that takes: the log ``pmstore`` tells for which process (INFO; WARNING
        if it has the store open for something else than a fit). For fits that run side by side in processes, give
        each a path of its own. What may be waiting for this ``fit`` is not waited for: the same process with the store
        open elsewhere, or a process that started this one. Pickled, as for the processes of ``n_jobs=2``, an open
        store becomes its path, and so can't be used there while it is open: pass the path.
    name : str, default=None
        The group of the store that holds this fit and no other. None: a group ``kmeans/<hash of all that the fit
        depends on>``, so that every fit finds its own; :func:`pmstore.prune` deletes the finished ones.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
    labels_ : ndarray of shape (n_samples,), int32
    inertia_ : float
    n_iter_ : int
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features_in_,)
        As in :class:`sklearn.cluster.KMeans`. Copies: they don't refer to the store.
    resumed_from_run_, resumed_from_iter_ : int
        The run (of ``n_init``, from 0) that ``fit`` found in the store, and how many iterations of that run were done.
        0 and 0 when it started afresh.

    Raises
    ------
    FingerprintMismatchError
        By ``fit``, if the group `name` holds anything but an earlier attempt at this fit: same data, sample weights,
        parameters (all but `store`, `name` and `verbose`), versions of scikit-learn, numpy and BLAS, and threads. The
        message says what differs. Also if somebody changed what that attempt left.
    TransactionError
        By ``fit`` and ``reset``, if a transaction of `store` is open in this thread.
    StoreLockedError
        By ``fit`` and ``reset`` with a path, if what has that store open may be waiting for this.

    Notes
    -----
    The store gains two arrays of (n_clusters, n_features), one of which changes per iteration, and from the end of the
    first run on the centres and labels of the best run. In several threads that fit with the same open store,
    iterations take turns.

    With ``copy_x=False`` the data that ``fit`` leaves behind are not exactly those that it was given, in scikit-learn
    as here, and so count as other data.

    References
    ----------
    A. Wood et al., "Towards Fast Crash-Consistent Cluster Checkpointing", IEEE HPEC 2022: KMeans over PyMM, which
    checkpoints its centres into persistent memory. Here nothing in the algorithm says what to write.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from pmstore.cluster import KMeans
    >>> X, _ = load_digits(return_X_y=True)
    >>> first = KMeans(10, n_init=3, random_state=0, store="digits.pm").fit(X)
    >>> again = KMeans(10, n_init=3, random_state=0, store="digits.pm").fit(X)  # loads
    >>> bool((first.labels_ == again.labels_).all())
    True
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 (the name and the kind are scikit-learn's)
        **_sklearn.SklearnKMeans._parameter_constraints,
        "store": [Store, str, os.PathLike, None],
        "name": [str, None],
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: Any = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        verbose: int = 0,
        random_state: Any = None,
        copy_x: bool = True,
        algorithm: str = "lloyd",
        store: StoreOrPath | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            n_clusters=n_clusters,
            init=init,
            n_init=n_init,
            max_iter=max_iter,
            tol=tol,
            verbose=verbose,
            random_state=random_state,
            copy_x=copy_x,
            algorithm=algorithm,
        )
        self.store = store
        self.name = name

    @_sklearn.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Compute the clusters, or go on computing them, or load them.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
        y : ignored
        sample_weight : array-like of shape (n_samples,), default=None

        Returns
        -------
        KMeans
            The estimator.
        """
        if self.store is None:
            super().fit(X, sample_weight=sample_weight)
            self.resumed_from_run_ = self.resumed_from_iter_ = 0
            return self
        if self.algorithm != "lloyd":
            raise ValueError(
                f"algorithm={self.algorithm!r} can't keep its state in a store: this version of pmstore knows "
                "algorithm='lloyd' only"
            )
        self._fit_in_store(X, sample_weight)
        return self

    def reset(self) -> KMeans:
        """Forget the fit in the store, so that the next ``fit`` starts afresh.

        With ``name=None`` that is the fit that this estimator last worked on.

        Returns
        -------
        KMeans
            The estimator; its fitted attributes stay.
        """
        if self.store is None:
            raise ValueError("reset() needs a store to forget the fit in, and store=None")
        name = getattr(self, "_slot_name", None) if self.name is None else self.name
        if name is None:
            raise ValueError("with name=None, reset() forgets what this estimator last worked on: call fit first")
        if isinstance(self.store, Store) or os.path.exists(self.store):
            with opened(self.store, "reset() commits") as store:
                slot = Slot(store, name)
                with slot.worked_on():
                    slot.forget()
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters.

        Parameters
        ----------
        deep : bool, default=True
            As in scikit-learn; of no effect here.

        Returns
        -------
        dict
        """
        parameters: dict[str, Any] = super().get_params(deep)
        if isinstance(self.store, Store) and _sklearn.is_being_shown():
            parameters["store"] = _Shown(self.store.path)
        return parameters

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if isinstance(state.get("store"), Store):
            state["store"] = os.fspath(state["store"].path)
        return state

    def _fit_in_store(self, given: Any, sample_weight: Any) -> None:
        X = _sklearn.validate_data(
            self,
            given,
            accept_sparse="csr",
            dtype=[np.float64, np.float32],
            order="C",
            copy=False,
            accept_large_sparse=False,
        )
        weights = _sklearn.check_sample_weight(sample_weight, X, dtype=X.dtype)
        init = self._check_parameters(X)
        self._n_threads = _sklearn.openmp_threads()
        self._check_mkl_vcomp(X, X.shape[0])

        fingerprint = self._fingerprint(X, None if sample_weight is None else weights)
        self._slot_name = slot_name("kmeans", fingerprint) if self.name is None else self.name
        assert self.store is not None
        with opened(self.store, "fit() commits after every iteration") as store:
            slot = Slot(store, self._slot_name)
            with slot.worked_on():
                found = slot.admit(fingerprint)
                if found:
                    check_slot(slot, X, self.n_clusters)
                self._set_progress(slot, found)
                if not slot.finished:
                    slot.check_writable()
                    in_place = isinstance(X, np.ndarray) and not _needs_copy(X, given, self.copy_x)
                    self._run(slot, X, in_place, weights, init, found, fingerprint)
                elif isinstance(self.random_state, np.random.RandomState):
                    restore_random_state(slot, self.random_state)  # where running the fit would have left it
                self._load(slot)

    def _check_parameters(self, X: Any) -> Any:
        """Check the parameters against the data as scikit-learn does; returns `init`, an array as a checked copy."""
        # A stand-in for the data: finding the tolerance takes a pass over them, and its result is in the slot of a fit.
        self._check_params_vs_input(np.broadcast_to(X.dtype.type(0), (X.shape[0], 1)))
        if isinstance(self.random_state, np.random.RandomState):
            check_random_state_kind(self.random_state)
        if not _sklearn.is_arraylike(self.init):
            return self.init
        init = _sklearn.check_array(self.init, dtype=X.dtype, copy=True, order="C")
        self._validate_center_shape(X, init)
        return init

    def _fingerprint(self, X: Any, weights: Array | None) -> Fingerprint:
        parameters = self.get_params(deep=False)
        for name in ("store", "name", "verbose"):
            del parameters[name]
        return {
            "estimator": f"KMeans, layout {LAYOUT}",
            **describe_data(X),
            **describe_weights(weights),
            **describe_parameters(parameters),
            "scikit-learn": _sklearn.version,
            **describe_environment(self._n_threads, _sklearn.libraries()),
        }

    def _set_progress(self, slot: Slot, found: bool) -> None:
        """Say where the fit in the slot is."""
        self.resumed_from_run_ = self.resumed_from_iter_ = 0
        if not found:
            return
        progress = slot.group["progress"]
        self.resumed_from_run_, self.resumed_from_iter_ = int(progress["run"]), int(progress["iteration"])
        logger.info(
            "KMeans: %s %r in %s, at run %d of %d, %d iterations done",
            "loading" if slot.finished else "resuming",
            slot.name,
            slot.store.path,
            self.resumed_from_run_,
            self._n_init,
            self.resumed_from_iter_,
        )

    def _run(
        self, slot: Slot, X: Any, in_place: bool, weights: Array, init: Any, found: bool, fingerprint: Fingerprint
    ) -> None:
        """Do what is left of a fit that isn't finished. Dense data are centred, and if that is in place, put back."""
        mean: Array | None = None
        if found:
            tolerance = float(slot.group["progress"]["tolerance"])
        else:
            tolerance = float(_sklearn.tolerance(X, self.tol))
        if isinstance(X, np.ndarray):
            mean = np.array(slot.group["mean"]) if found else X.mean(axis=0)
            X = np.subtract(X, mean, out=X if in_place else None)
            if isinstance(init, np.ndarray):
                init -= mean
        random_state, seed = self._random_state(slot)
        squared_norms = functools.cache(
            lambda: _sklearn.row_norms(X, squared=True)
        )  # a pass that a resume may not need

        def initial_centers() -> Array:
            centers: Array = self._init_centroids(
                X, x_squared_norms=squared_norms(), init=init, random_state=random_state, sample_weight=weights
            )
            return centers

        lloyd = Lloyd(
            slot,
            Data(X, weights, mean, tolerance),
            runs=self._n_init,
            max_iter=self.max_iter,
            threads=self._n_threads,
            random_state=random_state,
            initial_centers=initial_centers,
            verbose=bool(self.verbose),
        )
        try:
            if found:
                lloyd.resume()
            else:
                lloyd.start(fingerprint, seed)
        finally:
            if in_place:
                X += mean

    def _random_state(self, slot: Slot) -> tuple[np.random.RandomState, int | None]:
        """The fit's generator and, with ``random_state=None``, the seed that it was made from."""
        if self.random_state is not None:
            return _sklearn.check_random_state(self.random_state), None
        seed = slot.group.get("seed")
        if seed is None:
            seed = int(_sklearn.check_random_state(None).randint(np.iinfo(np.int32).max))
        return np.random.RandomState(seed), seed

    def _load(self, slot: Slot) -> None:
        """Set the fitted attributes from a finished fit."""
        progress = slot.group["progress"]
        self.cluster_centers_ = np.array(slot.group["best/centers"])
        self.labels_ = np.array(slot.group["best/labels"])
        self.inertia_ = float(progress["best_inertia"])
        self.n_iter_ = int(progress["best_iterations"])
        self._tol = float(progress["tolerance"])
        self._n_features_out = self.cluster_centers_.shape[0]
        distinct = len(np.unique(self.labels_))
        if distinct < self.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({distinct}) found smaller than n_clusters ({self.n_clusters}). "
                "Possibly due to duplicate points in X.",
                _sklearn.ConvergenceWarning,
                stacklevel=5,
            )


def _needs_copy(X: Array, given: Any, copy_x: bool) -> bool:
    """Whether `X`, which validation made of `given`, has to be copied before it is centred in place."""
    if copy_x:
        return not isinstance(given, np.ndarray) or np.may_share_memory(X, given)
    base: Any = X
    while isinstance(base, np.ndarray):
        base = base.base
    # A buffer of cffi's: an array in a store, whose centred elements the commits would make durable.
    return type(base).__module__ == "_cffi_backend"
