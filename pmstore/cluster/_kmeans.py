"""KMeans that survives a kill."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fit import CONSTRAINTS
from pmstore._resume.fit_group import StoreOrPath
from pmstore._values.array import root_of
from pmstore.cluster import _sklearn
from pmstore.cluster._elkan import Elkan
from pmstore.cluster._lloyd import Lloyd
from pmstore.cluster._sharded import KMeansFit, labels_of
from pmstore.scale._fit import ENGINE, OnShards
from pmstore.scale._lazy import is_sharded, lazily
from pmstore.scale._shards import is_dask

Array = npt.NDArray[Any]


class KMeans(OnShards, _sklearn.SklearnKMeans):
    """scikit-learn's KMeans, with the state of the fit in a store, and on many workers.

    ``fit`` commits after every iteration, or as set by `commit_every`. The same ``fit`` again, in another process if
    this one was killed, continues after the last commit. If the fit was finished, it loads the result. The result is
    the same, bit for bit, as that of scikit-learn's own KMeans with the same parameters and the same number of threads,
    if scikit-learn's result is reproducible: with more than two threads, scikit-learn adds partial sums in the order in
    which they arrive.

    With `engine`, workers hold the data in shards, and ``fit`` takes whatever :func:`pmstore.scale.shards_of` takes.
    The result depends on the shards, not on the engine, the number of workers, or which of them died. For a single
    shard it is that of this class without `engine`, with one thread, bit for bit.

    Parameters
    ----------
    n_clusters, n_init, max_iter, tol, verbose, random_state, copy_x, algorithm
        As in :class:`sklearn.cluster.KMeans`. With ``random_state=None`` a seed is drawn once and kept in the store, so
        that ``fit`` again gives the same result, until the fit group is forgotten. The fit depends on the current state
        of a ``RandomState``. With `engine`, `verbose` and `copy_x` have no effect, and `algorithm` is "lloyd".
    init : {"k-means++", "k-means||", "random"}, callable or array-like of shape (n_clusters, n_features)
        As in scikit-learn, and "k-means||" for `engine`. With `engine` and several shards, "k-means++" takes 2
        n_clusters - 1 epochs, each of them a pass over the data, and "k-means||" seven, however many clusters there
        are: prefer it for more than about 20. A callable is refused, as it needs all data in one place.
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
    engine : int, dask.distributed.Client or Engine, default=None
        Where the shards are computed: a number of processes on this machine, or what else
        :meth:`pmstore.MapReduce.run` takes. ``store=None`` is possible then, too. It has no effect on the result: a
        fit can go on with another engine. A pickle of the estimator keeps a number; anything else becomes None.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
    labels_ : ndarray of shape (n_samples,), int32
        With `engine` and data that aren't one array of numpy: a dask array for one of dask, otherwise a
        :class:`pmstore.scale.LazyParts`; both are computed when they are asked for, and not part of a pickle.
        A part whose shard is not what it was in the fit is a :class:`ShardError`; blocks of dask are not compared.
    inertia_ : float
    n_iter_ : int
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features_in_,)
        As in :class:`sklearn.cluster.KMeans`. Copies: they don't refer to the store.
    resumed_from_run_, resumed_from_iter_ : int
        The run (of ``n_init``, from 0) that ``fit`` found in the store, and the number of its iterations that were
        done (with `engine`, of its epochs). 0 and 0 for a new start.
    history_ : History
        One row for every iteration, as :func:`pmstore.history` returns it. Not set by a fit without a store, unless the
        estimator has callbacks. With `engine`, one row for every epoch, also for those of the start, whose objective is
        NaN.

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
    ShardError, NondeterminismError, WorkersLostError
        By ``fit`` with `engine`, as by :meth:`pmstore.MapReduce.run`: a shard can't be loaded, has changed, or has NaN
        or infinity in it; workers compute with different libraries, or there are none.
    ValueError, TypeError
        By ``fit`` with `engine`, if the shards aren't matrices of real numbers of the same width, or one has no rows;
        for sparse data, sample weights, ``algorithm="elkan"`` and a callable `init`.

    Notes
    -----
    The store holds two arrays of (n_clusters, n_features), one of which changes in each iteration, and from the end of
    the first run on the centres and labels of the best run. With ``algorithm="elkan"``, the labels and the bounds on
    distances change in each iteration, too: n_samples times n_clusters + 2 numbers. If several threads fit with the
    same open store, one iteration runs at a time.

    With `engine`, every worker holds its shards minus the mean of all data, as far as its memory goes; it loads and
    centres the others in every epoch. An epoch of Lloyd's algorithm is an iteration. Another one follows if a cluster
    became empty, and there are some for the mean, the variance, the start and the inertia.

    With ``copy_x=False``, ``fit`` changes the data slightly by rounding, as scikit-learn does. The next ``fit`` treats
    them as other data. Data in memory that numpy did not allocate are copied all the same: an array of a store, also
    through DLPack or a memoryview, would be committed while it is centred.

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
        "init": _sklearn.INIT,
        **CONSTRAINTS,
        **ENGINE,
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
        engine: Any = None,
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
        self.engine = engine

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KMeans:
        """Compute the clusters, continue computing them, or load them.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            With `engine`: what :func:`pmstore.scale.shards_of` takes, dense and of two axes. float32 if all of it is,
            otherwise computed in float64.
        y : ignored
        sample_weight : array-like of shape (n_samples,), default=None
            Not with `engine`.

        Returns
        -------
        KMeans
            The estimator.
        """
        if self._is_sharded():
            return self._fit_sharded(X, sample_weight)
        if isinstance(self.init, str) and self.init == "k-means||":
            raise ValueError('init="k-means||" is for fits over shards: give an engine, or use init="k-means++"')
        if self._is_scikit_learns():
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
        self._warn_of_few(len(np.unique(self.labels_)))
        return self

    def _warn_of_few(self, distinct: int) -> None:
        if distinct < self.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({distinct}) found smaller than n_clusters ({self.n_clusters}). "
                "Possibly due to duplicate points in X.",
                common.ConvergenceWarning,
                stacklevel=5,
            )

    def _fit_sharded(self, X: Any, sample_weight: Any) -> KMeans:
        """Fit on the engine's workers."""
        if sample_weight is not None:
            raise ValueError("engine takes no sample_weight: repeat rows, or fit with engine=None")
        if self.algorithm == "elkan":
            raise ValueError(
                'engine computes algorithm="lloyd" only: the bounds of "elkan" are a state of every sample, which '
                "would have to survive its worker"
            )
        init, runs = self._checked_for_shards()
        fit, state = self._fit_on_shards(X, lambda shards: KMeansFit(self, shards, init, runs))
        centers, assigning, mean = state["best/centers"], state["best/assigning"], state.mean
        self.cluster_centers_ = centers + mean
        self.inertia_, self.n_iter_ = state.best_inertia, state.best_lloyd
        self._tol, self._n_threads, self._n_features_out = state.tolerance, common.openmp_threads(), len(centers)
        labels = functools.partial(labels_of, mean=mean, centers=assigning)
        if is_dask(X):  # a cluster may compute blocks in another memory order, which a hash tells apart
            self.labels_ = lazily(X, labels)
        else:
            parts = fit.parts(labels)
            self.labels_ = np.asarray(parts) if isinstance(X, np.ndarray) else parts
        self._warn_of_few(state.best_distinct)
        return self

    def _checked_for_shards(self) -> tuple[Any, int]:
        """`init` and the number of runs, as scikit-learn's ``_check_params_vs_input`` has them."""
        init, runs = self.init, self.n_init
        if callable(init):
            raise ValueError("engine takes no callable init, which needs all data in one place: pass the centers")
        if common.is_arraylike(init):
            if runs not in ("auto", 1):
                warnings.warn(
                    "Explicit initial center position passed: performing only one init in KMeans instead of "
                    f"n_init={runs}.",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return common.check_array(init, dtype=[np.float64, np.float32], copy=True, order="C"), 1
        if runs == "auto":
            runs = 10 if init == "random" else 1
        return init, runs

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit, and transform the data.

        Parameters
        ----------
        X, y, sample_weight
            As for `fit`.

        Returns
        -------
        ndarray of shape (n_samples, n_clusters)
            Or what `transform` returns for shards.
        """
        if self._is_sharded():
            return self.fit(X, sample_weight=sample_weight).transform(X)
        return super().fit_transform(X, sample_weight=sample_weight)

    def predict(self, X: Any) -> Any:
        """The nearest cluster of each sample.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Or data in shards: an array of dask or zarr, a path, a `Shard`, or a list of arrays, paths and shards.
            Arrays of real numbers are cast to the dtype of ``cluster_centers_``.

        Returns
        -------
        ndarray of shape (n_samples,), int32
            For an array of dask: one of dask. For other data in shards: a :class:`pmstore.scale.LazyParts`.
        """
        return self._over("predict", X) if is_sharded(X) else super().predict(self._like_centers(X))

    def transform(self, X: Any) -> Any:
        """The distances of each sample from all cluster centres.

        Parameters
        ----------
        X
            As for `predict`.

        Returns
        -------
        ndarray of shape (n_samples, n_clusters)
            For data in shards as for `predict`: arrays, whatever `set_output` says.
        """
        return self._over("transform", X) if is_sharded(X) else super().transform(X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The sum of the samples' squared distances from their nearest centres, with a minus sign.

        Parameters
        ----------
        X
            As for `predict`. The shards are loaded in this process, one after the other.
        y
            Ignored.
        sample_weight : array-like of shape (n_samples,), optional
            Not for data in shards.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            Data in shards come with `sample_weight`.
        """
        if not is_sharded(X):
            return float(super().score(self._like_centers(X), y, sample_weight))
        if sample_weight is not None:
            raise ValueError("score() of data in shards takes no sample_weight: add up the scores of the parts")
        estimator, blocks = self._blocks(X)
        return float(sum(map(estimator.score, blocks)))

    def _like_centers(self, X: Any) -> Any:
        """An array of real numbers in the dtype of the centres, as scikit-learn's kernels need both: shards may have
        different dtypes. Other data as they are."""
        common.check_is_fitted(self)
        real = isinstance(X, np.ndarray) and X.dtype.kind in "fiub"
        return X.astype(self.cluster_centers_.dtype, copy=False) if real else X


def _needs_copy(X: Array, given: Any, copy_x: bool) -> bool:
    """Whether `X`, which validation made from `given`, must be copied before it is centred in place."""
    if copy_x:
        return not isinstance(given, np.ndarray) or np.may_share_memory(X, given)
    # Memory that numpy did not allocate may be that of a store, whose commits would make the centred elements durable.
    return not root_of(X).flags.owndata
