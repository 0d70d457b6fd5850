"""KMeans that survives a kill."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fit import CONSTRAINTS, InStore
from pmstore._resume.fit_group import StoreOrPath
from pmstore.cluster import _sklearn
from pmstore.cluster._elkan import Elkan
from pmstore.cluster._lloyd import Lloyd

Array = npt.NDArray[Any]


class KMeans(InStore, _sklearn.SklearnKMeans):
    """scikit-learn's KMeans, with the state of the fit in a store.

    ``fit`` commits after every iteration, or as set by `commit_every`. The same ``fit`` again, in another process if
    this one was killed, continues after the last commit. If the fit was finished, it loads the result. The result is
    the same, bit for bit, as that of scikit-learn's own KMeans with the same parameters and the same number of threads,
    if scikit-learn's result is reproducible: with more than two threads, scikit-learn adds partial sums in the order in
    which they arrive.

    Parameters
    ----------
    n_clusters, init, n_init, max_iter, tol, verbose, random_state, copy_x, algorithm
        As in :class:`sklearn.cluster.KMeans`. With ``random_state=None`` a seed is drawn once and kept in the store, so
        that ``fit`` again gives the same result, until the fit group is forgotten. The fit depends on the current state
        of a ``RandomState``.
    store : Store, str or path-like, default=None
        The path of a store, which is created if it doesn't exist, and is open while ``fit`` works on it; or an open
        store, outside of any transaction. In an open store, every commit includes all other pending changes. None:
        scikit-learn's own ``fit``.

        If this process has the store open at the path, in a notebook or in other threads that fit, ``fit`` uses that
        store. Of several processes, one has the store open, and the others wait until it is closed. The log
        ``pmstore`` names the process that they wait for (INFO; WARNING if it has the store open for something else than
        a fit). For fits that run side by side in processes, give each a path of its own. ``fit`` does not wait for a
        process that started this one, and may be waiting for this ``fit``. When an open store is pickled with an
        estimator, as for the processes of ``n_jobs=2``, it becomes its path, and can't be used there while it is open:
        close it, and pass the path instead.
    name : str, default=None
        The group of the store that holds only this fit. None: a group ``kmeans/<hash of everything that the fit depends
        on>``, so that every fit finds its own; :func:`pmstore.prune` deletes the finished ones.
    commit_every : int or float, default=1
        An int: ``fit`` commits after that many iterations. A float: it commits after the first iteration that ends that
        many seconds after the last commit. The end of a run is always committed.

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
        The run (of ``n_init``, from 0) that ``fit`` found in the store, and the number of its iterations that were
        done. 0 and 0 for a new start.
    history_ : History
        One row for every iteration, as :func:`pmstore.history` returns it. Not set by a fit without a store, unless the
        estimator has callbacks.

    Raises
    ------
    FingerprintMismatchError
        By ``fit``, if the group `name` holds something else than an earlier attempt at this fit, with the same data,
        sample weights, parameters (except `store`, `name`, `commit_every` and `verbose`), versions of scikit-learn,
        numpy and BLAS, and threads. The message names the differences. Also if other code changed that attempt's state.
    TransactionError
        By ``fit`` and ``reset``, if a transaction of `store` is open in this thread.
    StoreLockedError
        By ``fit`` and ``reset`` with a path, if the holder of the store may be waiting for this call.

    Notes
    -----
    The store holds two arrays of (n_clusters, n_features), one of which changes in each iteration, and from the end of
    the first run on the centres and labels of the best run. With ``algorithm="elkan"``, the labels and the bounds on
    distances change in each iteration, too: n_samples times n_clusters + 2 numbers. If several threads fit with the
    same open store, one iteration runs at a time.

    With ``copy_x=False``, ``fit`` changes the data slightly by rounding, as scikit-learn does. The next ``fit`` treats
    them as other data.

    References
    ----------
    A. Wood et al., "Towards Fast Crash-Consistent Cluster Checkpointing", IEEE HPEC 2022: KMeans over PyMM, which
    checkpoints its centres into persistent memory. Here the algorithm does not name the data to write.

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
        **CONSTRAINTS,
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
        commit_every: float = 1,
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
        self.commit_every = commit_every

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Compute the clusters, continue computing them, or load them.

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
        if self._is_theirs():
            self._started_afresh()
            super().fit(X, sample_weight=sample_weight)
            return self
        given = X
        X = _sklearn.validated(self, given)
        weights = common.check_sample_weight(sample_weight, X, dtype=X.dtype)
        init = _sklearn.checked_init(self, X)
        self._n_threads = common.openmp_threads()
        in_place = isinstance(X, np.ndarray) and not _needs_copy(X, given, self.copy_x) and not self._has_callbacks()
        if self._algorithm == "lloyd":
            self._check_mkl_vcomp(X, X.shape[0])
        algorithm = Lloyd if self._algorithm == "lloyd" else Elkan
        runs = algorithm(self, X, weights, init, weighted=sample_weight is not None, in_place=in_place)
        try:
            told = None if sample_weight is None else {"sample_weight": weights}
            state = self._fit_in_store(runs, X=X, y=y, metadata=told)
        finally:
            runs.put_data_back()
        self.cluster_centers_ = state["best/centers"]
        self.labels_ = state["best/labels"]
        self.inertia_ = state.best_inertia
        self.n_iter_ = state.best_iterations
        self._tol = state.tolerance
        self._n_features_out = self.cluster_centers_.shape[0]
        runs.end_callbacks()
        distinct = len(np.unique(self.labels_))
        if distinct < self.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({distinct}) found smaller than n_clusters ({self.n_clusters}). "
                "Possibly due to duplicate points in X.",
                common.ConvergenceWarning,
                stacklevel=3,
            )
        return self


def _needs_copy(X: Array, given: Any, copy_x: bool) -> bool:
    """Whether `X`, which validation made from `given`, must be copied before it is centred in place."""
    if copy_x:
        return not isinstance(given, np.ndarray) or np.may_share_memory(X, given)
    base: Any = X
    while isinstance(base, np.ndarray):
        base = base.base
    # A buffer of cffi: an array in a store, whose centred elements the commits would make durable.
    return type(base).__module__ == "_cffi_backend"
