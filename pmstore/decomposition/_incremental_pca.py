"""IncrementalPCA that survives a kill.

Each batch is one call of scikit-learn's own ``partial_fit``. To continue, it needs the components, their singular
values, and mean and variance of the data. The explained variances follow from these, and are computed when the fit is
finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from pmstore._resume import sklearn as common
from pmstore._resume.fit import CONSTRAINTS, Fit
from pmstore._resume.fit_group import StoreOrPath
from pmstore._resume.state import Field, State
from pmstore.decomposition import _sklearn
from pmstore.decomposition._sharded import ShardedPCA
from pmstore.scale._fit import ENGINE, OnShards
from pmstore.scale._lazy import is_sharded

__all__ = ["IncrementalPCA"]


class PCAFit(Fit):
    """The fit of an IncrementalPCA, batch after batch.

    Parameters
    ----------
    estimator : IncrementalPCA
        The estimator, checked, with ``batch_size_`` set.
    X : ndarray or sparse matrix of shape (n, d), float32 or float64
    """

    def __init__(self, estimator: Any, X: Any) -> None:
        super().__init__(estimator, X, threads=common.openmp_threads())
        self.X = X
        smallest = estimator.n_components or 0
        self.batches = list(_sklearn.gen_batches(X.shape[0], estimator.batch_size_, min_batch_size=smallest))
        self.max_iter = len(self.batches)

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        n, d = len(range(*self.batches[0].indices(self.X.shape[0]))), self.X.shape[1]
        k = min(n, d, self.estimator.n_components or d)
        # The mean has dtype float64, and makes all other arrays float64 in the second batch.
        dtype = self.X.dtype if self.max_iter == 1 else np.float64
        yield from super().fields()
        yield Field("components", (k, d), dtype)
        yield Field("singular_values", k, dtype)
        yield Field("mean", d)
        yield Field("var", d)
        yield Field("n_samples_seen", dtype=object)
        yield Field("noise_variance", dtype=object)

    def start(self) -> Mapping[str, float]:
        """The first batch, which shows whether there are as many components as requested."""
        super().start()
        figures = self.step()
        self.state.iteration = 1
        return figures

    def derive(self) -> None:
        """Only check the resumed state: there are no derived fields."""
        self.check()

    def check(self) -> None:
        """Refuse stored values with errors that the table of fields can't detect."""
        for name in ("n_samples_seen", "noise_variance"):
            if isinstance(self.state[name], bool) or not isinstance(self.state[name], Real):
                raise self.changed(name)

    def step(self) -> Mapping[str, float]:
        """One batch. The objective is the part of the variance that the components explain."""
        state, batch = self.state, self.X[self.batches[self.state.iteration]]
        batch = np.array(batch) if isinstance(batch, np.ndarray) else batch.toarray()  # partial_fit centres in place
        pca = _sklearn.SklearnIncrementalPCA(self.estimator.n_components)
        pca.components_, pca.n_samples_seen_, pca.mean_, pca.var_ = None, 0, 0.0, 0.0
        if state.iteration:
            dtype = self.X.dtype if state.iteration == 1 else np.float64
            pca.components_, pca.singular_values_ = state.components.astype(dtype), state.singular_values.astype(dtype)
            pca.mean_, pca.var_, pca.n_samples_seen_ = state.mean, state.var, state.n_samples_seen
        pca.partial_fit(batch, check_input=False)
        self._learned = vars(pca)
        state.components, state.singular_values = pca.components_, pca.singular_values_
        state.mean, state.var = pca.mean_, pca.var_
        state.n_samples_seen, state.noise_variance = pca.n_samples_seen_, pca.noise_variance_
        return {"objective": pca.explained_variance_ratio_.sum(), "noise_variance": pca.noise_variance_}

    def fitted(self) -> dict[str, Any]:
        """All that the last batch left."""
        return {name: value for name, value in self._learned.items() if name.endswith("_")}


class IncrementalPCA(OnShards, _sklearn.SklearnIncrementalPCA):
    """scikit-learn's IncrementalPCA, with the state of the fit in a store, and on many workers.

    ``fit`` commits after every batch, or as set by `commit_every`. The same ``fit`` again, in another process if this
    one was killed, continues after the last commit. If the fit was finished, it loads the result. The result is the
    same as that of scikit-learn's own class, bit for bit. ``partial_fit`` is scikit-learn's own, and does not use the
    store: :func:`pmstore.partial_fit` is for batches that come one by one.

    With `engine`, workers learn the shards side by side, each batch by batch, and what they learned is combined in an
    order that depends on the shards only. ``fit`` then takes whatever :func:`pmstore.scale.shards_of` takes. For a
    single shard the result is that of this class without `engine`, with one thread, bit for bit.

    Parameters
    ----------
    n_components, whiten, batch_size
        As in :class:`sklearn.decomposition.IncrementalPCA`.
    copy : bool, default=True
        As in scikit-learn. With a store, the data are never changed, and only one batch at a time is copied.
    store : Store, str or path-like, default=None
    name : str, default=None
    commit_every : int or float, default=1
        As in :class:`pmstore.cluster.KMeans`, but counted in batches.
    engine : int, dask.distributed.Client or Engine, default=None
        As in :class:`pmstore.cluster.KMeans`. The fit is one epoch: a coordinator that is killed starts again.

    Attributes
    ----------
    components_ : ndarray of shape (n_components_, n_features)
    explained_variance_, explained_variance_ratio_, singular_values_ : ndarray of shape (n_components_,)
    mean_, var_ : ndarray of shape (n_features,), float64
    noise_variance_ : float
        With `engine` and several shards: the rest of the variance, divided by the number of the other components.
    n_components_, batch_size_, n_features_in_ : int
    n_samples_seen_ : int or float
    feature_names_in_ : ndarray of shape (n_features_in_,)
        As in :class:`sklearn.decomposition.IncrementalPCA`. Copies: they don't refer to the store.
    resumed_from_run_, resumed_from_iter_ : int
        0, and the number of batches that were done when ``fit`` found the fit in the store.
    history_ : History
        As in :class:`pmstore.cluster.KMeans`.

    Raises
    ------
    FingerprintMismatchError, TransactionError, StoreLockedError
        As by :class:`pmstore.cluster.KMeans`.
    ShardError, NondeterminismError, WorkersLostError, ValueError, TypeError
        By ``fit`` with `engine`, as by :class:`pmstore.cluster.KMeans`.

    Notes
    -----
    The store holds about (n_components_ + 2) × (n_features + 1) numbers, all of which change in every batch.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from pmstore.decomposition import IncrementalPCA
    >>> X, _ = load_digits(return_X_y=True)
    >>> first = IncrementalPCA(7, batch_size=200, store="pca.pm").fit(X)
    >>> again = IncrementalPCA(7, batch_size=200, store="pca.pm").fit(X)  # loads
    >>> bool((first.components_ == again.components_).all())
    True
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 (the name and the kind are scikit-learn's)
        **_sklearn.SklearnIncrementalPCA._parameter_constraints,
        **CONSTRAINTS,
        **ENGINE,
    }

    def __init__(
        self,
        n_components: int | None = None,
        *,
        whiten: bool = False,
        copy: bool = True,
        batch_size: int | None = None,
        store: StoreOrPath | None = None,
        name: str | None = None,
        commit_every: float = 1,
        engine: Any = None,
    ) -> None:
        super().__init__(n_components=n_components, whiten=whiten, copy=copy, batch_size=batch_size)
        self.store = store
        self.name = name
        self.commit_every = commit_every
        self.engine = engine

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None) -> IncrementalPCA:
        """Compute the components batch by batch, continue computing them, or load them.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            With `engine`: what :func:`pmstore.scale.shards_of` takes, dense and of two axes.
        y : ignored

        Returns
        -------
        IncrementalPCA
            The estimator.
        """
        if self._is_sharded():
            fit, state = self._fit_on_shards(X, lambda shards: ShardedPCA(self, shards))
            self.batch_size_ = fit.batch_size
            self._take(state, fit.batches())
            return self
        if self._is_scikit_learns():
            self._started_afresh()
            super().fit(X)
            return self
        X = common.validate_data(
            self, X, accept_sparse=["csr", "csc", "lil"], copy=False, dtype=[np.float64, np.float32]
        )
        self.batch_size_ = self.batch_size or 5 * X.shape[1]
        batches = PCAFit(self, X)
        state = self._fit_in_store(batches, X=X, y=y)
        batches.check()
        self._take(state, batches.batches)
        batches.end_callbacks()
        return self

    def _take(self, state: State, batches: Sequence[slice]) -> None:
        """Set the attributes."""
        self.n_samples_seen_, self.noise_variance_ = state.n_samples_seen, state.noise_variance
        self.components_ = _sklearn.laid_out(state.components, batches)
        self.singular_values_ = state.singular_values
        self.mean_, self.var_ = state.mean, state.var
        squares = self.singular_values_**2
        with np.errstate(divide="ignore", invalid="ignore"):  # partial_fit has warned
            self.explained_variance_ = squares / (self.n_samples_seen_ - 1)
            self.explained_variance_ratio_ = squares / np.sum(self.var_ * self.n_samples_seen_)
        self.n_components_ = self.n_components or len(self.components_)

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Fit, and transform the data.

        Parameters
        ----------
        X, y, **fit_params
            As for `fit`.

        Returns
        -------
        ndarray of shape (n_samples, n_components)
            Or what `transform` returns for shards.
        """
        if is_sharded(X):
            return self.fit(X, y, **fit_params).transform(X)
        return super().fit_transform(X, y, **fit_params)

    def transform(self, X: Any) -> Any:
        """The coordinates of each sample along the components.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n_samples, n_features)
            Or data in shards, as for :meth:`pmstore.cluster.KMeans.predict`.

        Returns
        -------
        ndarray of shape (n_samples, n_components)
            For an array of dask: one of dask. For other data in shards: a :class:`pmstore.scale.LazyParts`, of arrays
            whatever `set_output` says.
        """
        return self._over("transform", X) if is_sharded(X) else super().transform(X)

    def inverse_transform(self, X: Any) -> Any:
        """The samples with such coordinates.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_components)
            Or data in shards, as for `transform`.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
            For data in shards as for `transform`.
        """
        return self._over("inverse_transform", X) if is_sharded(X) else super().inverse_transform(X)
