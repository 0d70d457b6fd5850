"""GaussianMixture and BayesianGaussianMixture that survive a kill."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fit import CONSTRAINTS, InStore
from pmstore._resume.fit_group import StoreOrPath
from pmstore.mixture import _sklearn
from pmstore.mixture._em import EM, bound, has_converged
from pmstore.mixture._sharded import MixtureFit
from pmstore.scale._fit import ENGINE, OnShards
from pmstore.scale._lazy import is_sharded

Array = npt.NDArray[Any]


class _Mixture(InStore):
    """The common part of both mixtures. `_parameters` are the attributes that an iteration changes, in the order of
    scikit-learn's own ``_set_parameters``, without ``precisions_cholesky_``, which is last there."""

    _parameters: tuple[str, ...]

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None) -> Any:
        """Estimate the parameters, continue estimating them, or load them.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        object
            The estimator.
        """
        if self._is_scikit_learns():
            return super().fit(X)  # type: ignore[misc]
        self._fit(X, y)
        return self

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit_predict(self, X: Any, y: Any = None) -> Array:
        """Fit as `fit` does, and return the most probable component of every sample.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        ndarray of shape (n_samples,), int64
        """
        labels: Array
        if self._is_scikit_learns():
            self._started_afresh()
            labels = super().fit_predict(X)  # type: ignore[misc]
            return labels
        _, log_resp = self._e_step(self._fit(X, y))  # type: ignore[attr-defined]
        labels = np.argmax(log_resp, axis=1)
        return labels

    def _fit(self: Any, X: Any, y: Any) -> Any:
        """Fit in the store; returns the checked data."""
        X = common.validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        if X.shape[0] < self.n_components:
            raise ValueError(
                f"Expected n_samples >= n_components but got n_components = {self.n_components}, "
                f"n_samples = {X.shape[0]}"
            )
        _sklearn.check_parameters(self, X)
        em = EM(self, X, self._parameters)
        if not (em.max_iter or em.warm) and getattr(self, "precisions_init", None) is not None:
            raise ValueError("max_iter=0 with precisions_init leaves no covariances: use max_iter=1 or more")
        state = self._fit_in_store(em, X=X, y=y)
        parameters, bounds = em.result()
        self._set_parameters(parameters)
        self.n_iter_ = n = state.best_iterations
        self.converged_ = has_converged(bounds, n, self.tol)
        self.lower_bounds_ = [bound(bounds, i) for i in range(1, n + 1)]
        self.lower_bound_ = self.lower_bounds_[-1] if n else -np.inf
        em.end_callbacks()
        if n:
            self._warn_unless_converged()
        return X

    def _warn_unless_converged(self: Any) -> None:
        if not self.converged_:
            warnings.warn(
                "Best performing initialization did not converge. Try different init parameters, or increase "
                "max_iter, tol, or check for degenerate data.",
                common.ConvergenceWarning,
                stacklevel=5,
            )


class GaussianMixture(OnShards, _Mixture, _sklearn.SklearnGaussianMixture):
    """scikit-learn's GaussianMixture, with the state of the fit in a store, and on many workers.

    ``fit`` and ``fit_predict`` commit after every iteration, or as set by `commit_every`. The same call again, in
    another process if this one was killed, continues after the last commit. If the fit was finished, it loads the
    result. The result is the same as that of scikit-learn's own GaussianMixture with the same parameters and the same
    number of threads, bit for bit.

    With `engine`, workers hold the data in shards, and ``fit`` takes whatever :func:`pmstore.scale.shards_of` takes.
    The result depends on the shards, not on the engine, the number of workers, or which of them died. It is that of
    scikit-learn up to rounding, if the start is the same, as it is for a single shard with `init_params` "kmeans" and
    "k-means++".

    Parameters
    ----------
    n_components, covariance_type, tol, reg_covar, max_iter, n_init, init_params, weights_init, means_init, \
    precisions_init, random_state, warm_start, verbose, verbose_interval
        As in :class:`sklearn.mixture.GaussianMixture`. With a store and ``random_state=None`` a seed is drawn once and
        kept there, so that ``fit`` again gives the same result.

        With ``warm_start=True``, a second ``fit`` of the same estimator starts where the first one ended, and depends
        on that start. With ``name=None``, each fit has its own group in the store. A program that runs again after a
        kill loads the first fit and continues the second. A group with a `name` can hold only one of them.
        With `engine`, `warm_start` is refused, and `verbose` has no effect.
    store, name, commit_every, engine
        As in :class:`pmstore.cluster.KMeans`.

    Attributes
    ----------
    weights_ : ndarray of shape (n_components,)
    means_ : ndarray of shape (n_components, n_features)
    covariances_, precisions_, precisions_cholesky_ : ndarray
        Of shape (n_components, n_features, n_features) for ``covariance_type="full"``, (n_features, n_features) for
        "tied", (n_components, n_features) for "diag", (n_components,) for "spherical".
    converged_ : bool
    n_iter_ : int
    lower_bound_ : float
    lower_bounds_ : list of float, of length n_iter_
        Lower bounds of the mean log-likelihood of a sample, after each iteration of the best run.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features_in_,)
        All as in :class:`sklearn.mixture.GaussianMixture`. Copies: they don't refer to the store.
    resumed_from_run_, resumed_from_iter_ : int
        The run (of ``n_init``, from 0) that ``fit`` found in the store, and the number of its iterations that were
        done. 0 and 0 for a new start.
    history_ : History
        As in :class:`pmstore.cluster.KMeans`.

    Raises
    ------
    FingerprintMismatchError, TransactionError, StoreLockedError
        By ``fit``, ``fit_predict`` and ``reset``, as in :class:`pmstore.cluster.KMeans`.
    ShardError, NondeterminismError, WorkersLostError, ValueError, TypeError
        By ``fit`` with `engine`, as in :class:`pmstore.cluster.KMeans`.

    Notes
    -----
    The store holds ``weights_``, ``means_`` and ``covariances_``; with ``n_init`` > 1 those of the best run, too.
    ``precisions_cholesky_`` is as large as the covariances. When a fit is resumed or loaded, the same function computes
    the same bits from them. In float64, an iteration then writes n_components × n_features² × 8 bytes for "full".
    ``fit`` doesn't compute the labels that scikit-learn's ``fit`` discards.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from pmstore.mixture import GaussianMixture
    >>> X, _ = load_iris(return_X_y=True)
    >>> first = GaussianMixture(3, random_state=0, store="iris.pm").fit(X)
    >>> again = GaussianMixture(3, random_state=0, store="iris.pm").fit(X)  # loads
    >>> bool((first.precisions_ == again.precisions_).all())
    True
    """

    _parameters = ("weights_", "means_", "covariances_")
    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 (the name and the kind are scikit-learn's)
        **_sklearn.SklearnGaussianMixture._parameter_constraints,
        **CONSTRAINTS,
        **ENGINE,
    }

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        verbose_interval: int = 10,
        store: StoreOrPath | None = None,
        name: str | None = None,
        commit_every: float = 1,
        engine: Any = None,
    ) -> None:
        super().__init__(
            n_components=n_components,
            covariance_type=covariance_type,
            tol=tol,
            reg_covar=reg_covar,
            max_iter=max_iter,
            n_init=n_init,
            init_params=init_params,
            weights_init=weights_init,
            means_init=means_init,
            precisions_init=precisions_init,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            verbose_interval=verbose_interval,
        )
        self.store = store
        self.name = name
        self.commit_every = commit_every
        self.engine = engine

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None) -> Any:
        """Estimate the parameters, continue estimating them, or load them.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            With `engine`: what :func:`pmstore.scale.shards_of` takes, dense and of two axes.
        y : ignored

        Returns
        -------
        GaussianMixture
            The estimator.
        """
        return self._fit_sharded(X) if self._is_sharded() else super().fit(X, y)

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit_predict(self, X: Any, y: Any = None) -> Any:
        """Fit as `fit` does, and return the most probable component of every sample.

        Parameters
        ----------
        X, y
            As for `fit`.

        Returns
        -------
        ndarray of shape (n_samples,), int64
            Or what `predict` returns for shards.
        """
        return self._fit_sharded(X).predict(X) if self._is_sharded() else super().fit_predict(X, y)

    def _fit_sharded(self, X: Any) -> GaussianMixture:
        """Fit on the engine's workers."""
        if self.warm_start:
            raise ValueError("engine takes no warm_start: pass weights_init, means_init and precisions_init")
        if not self.max_iter and self.precisions_init is not None:
            raise ValueError("max_iter=0 with precisions_init leaves no covariances: use max_iter=1 or more")
        _, state = self._fit_on_shards(X, lambda shards: MixtureFit(self, shards))
        covariances = state["best/covariances"]
        cholesky = _sklearn.compute_precisions_cholesky(covariances, self.covariance_type)
        self._set_parameters((state["best/weights"], state["best/means"] + state.mean, covariances, cholesky))
        self.n_iter_, self.converged_ = state.best_em, state.best_close
        self.lower_bounds_ = state["best/bounds"].tolist()
        self.lower_bound_ = self.lower_bounds_[-1] if self.n_iter_ else -np.inf
        if self.n_iter_:
            self._warn_unless_converged()
        return self

    def predict(self, X: Any) -> Any:
        """The most probable component of each sample.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Or data in shards, as for :meth:`pmstore.cluster.KMeans.predict`.

        Returns
        -------
        ndarray of shape (n_samples,), int64
            For an array of dask: one of dask. For other data in shards: a :class:`pmstore.scale.LazyParts`.
        """
        return self._over("predict", X) if is_sharded(X) else super().predict(X)

    def predict_proba(self, X: Any) -> Any:
        """The probabilities of the components for each sample.

        Parameters
        ----------
        X
            As for `predict`.

        Returns
        -------
        ndarray of shape (n_samples, n_components)
            For data in shards as for `predict`.
        """
        return self._over("predict_proba", X) if is_sharded(X) else super().predict_proba(X)

    def score_samples(self, X: Any) -> Any:
        """The log-likelihood of each sample.

        Parameters
        ----------
        X
            As for `predict`.

        Returns
        -------
        ndarray of shape (n_samples,)
            For data in shards as for `predict`.
        """
        return self._over("score_samples", X) if is_sharded(X) else super().score_samples(X)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log-likelihood of the samples.

        Parameters
        ----------
        X
            As for `predict`. Shards are loaded in this process, one after the other.
        y
            Ignored.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            There are no samples.
        """
        if not is_sharded(X):
            return float(super().score(X, y))
        total, rows = self._log_likelihood(X)
        return total / rows

    def bic(self, X: Any) -> float:
        """The Bayesian information criterion: the lower, the better.

        Parameters
        ----------
        X
            As for `score`.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            There are no samples.
        """
        if not is_sharded(X):
            return float(super().bic(X))
        total, rows = self._log_likelihood(X)
        return float(-2 * total + self._n_parameters() * math.log(rows))

    def aic(self, X: Any) -> float:
        """The Akaike information criterion, as `bic`."""
        if not is_sharded(X):
            return float(super().aic(X))
        return float(-2 * self._log_likelihood(X)[0] + 2 * self._n_parameters())

    def _log_likelihood(self, X: Any) -> tuple[float, int]:
        """The sum over the samples of data in shards, and their number."""
        estimator, blocks = self._blocks(X)
        sums = [(estimator.score_samples(block).sum(), len(block)) for block in blocks]
        if not sums:
            raise ValueError("the shards have no rows, and so no mean")
        return float(sum(total for total, _ in sums)), sum(rows for _, rows in sums)


class BayesianGaussianMixture(_Mixture, _sklearn.SklearnBayesianGaussianMixture):
    """scikit-learn's BayesianGaussianMixture, with the state of the fit in a store.

    Commits, resuming and results are as for :class:`GaussianMixture`.

    Parameters
    ----------
    n_components, covariance_type, tol, reg_covar, max_iter, n_init, init_params, weight_concentration_prior_type, \
    weight_concentration_prior, mean_precision_prior, mean_prior, degrees_of_freedom_prior, covariance_prior, \
    random_state, warm_start, verbose, verbose_interval
        As in :class:`sklearn.mixture.BayesianGaussianMixture`, and `random_state` and `warm_start` as in
        :class:`GaussianMixture`.
    store, name, commit_every
        As in :class:`pmstore.cluster.KMeans`.

    Attributes
    ----------
    weight_concentration_ : ndarray of shape (n_components,), or tuple of two
    mean_precision_ : ndarray of shape (n_components,)
    degrees_of_freedom_ : ndarray of shape (n_components,), or float for ``covariance_type="tied"``
    weight_concentration_prior_, mean_precision_prior_, degrees_of_freedom_prior_ : float
    mean_prior_ : ndarray of shape (n_features,)
    covariance_prior_ : ndarray, or float for "spherical"
        As in :class:`sklearn.mixture.BayesianGaussianMixture`; all the others are those of :class:`GaussianMixture`.

    Raises
    ------
    FingerprintMismatchError, TransactionError, StoreLockedError
        As :class:`GaussianMixture`.

    Notes
    -----
    The store holds ``weight_concentration_``, ``mean_precision_``, ``means_``, ``degrees_of_freedom_`` and
    ``covariances_``. Every call of ``fit`` computes the priors from the data.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from pmstore.mixture import BayesianGaussianMixture
    >>> X, _ = load_iris(return_X_y=True)
    >>> fit = BayesianGaussianMixture(n_components=3, random_state=0, store="bayes.pm").fit(X)
    >>> fit.resumed_from_iter_, fit.converged_
    (0, True)
    """

    _parameters = ("weight_concentration_", "mean_precision_", "means_", "degrees_of_freedom_", "covariances_")
    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 (the name and the kind are scikit-learn's)
        **_sklearn.SklearnBayesianGaussianMixture._parameter_constraints,
        **CONSTRAINTS,
    }

    def __init__(
        self,
        *,
        n_components: int = 1,
        covariance_type: str = "full",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weight_concentration_prior_type: str = "dirichlet_process",
        weight_concentration_prior: float | None = None,
        mean_precision_prior: float | None = None,
        mean_prior: Any = None,
        degrees_of_freedom_prior: float | None = None,
        covariance_prior: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int = 0,
        verbose_interval: int = 10,
        store: StoreOrPath | None = None,
        name: str | None = None,
        commit_every: float = 1,
    ) -> None:
        super().__init__(
            n_components=n_components,
            covariance_type=covariance_type,
            tol=tol,
            reg_covar=reg_covar,
            max_iter=max_iter,
            n_init=n_init,
            init_params=init_params,
            weight_concentration_prior_type=weight_concentration_prior_type,
            weight_concentration_prior=weight_concentration_prior,
            mean_precision_prior=mean_precision_prior,
            mean_prior=mean_prior,
            degrees_of_freedom_prior=degrees_of_freedom_prior,
            covariance_prior=covariance_prior,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            verbose_interval=verbose_interval,
        )
        self.store = store
        self.name = name
        self.commit_every = commit_every
