"""GaussianMixture and BayesianGaussianMixture that survive a kill."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore import _sklearn as common
from pmstore._estimators import StoreOrPath
from pmstore._fit import CONSTRAINTS, InStore
from pmstore.mixture import _sklearn
from pmstore.mixture._em import EM, bound, has_converged

Array = npt.NDArray[Any]


class _Mixture(InStore):
    """What the two have in common: `_parameters`, the attributes that an iteration changes, in the order of
    scikit-learn's own ``_set_parameters``, but for ``precisions_cholesky_``, which comes last there."""

    _parameters: tuple[str, ...]

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: Any, y: Any = None) -> Any:
        """Estimate the parameters, or go on estimating them, or load them.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        object
            The estimator.
        """
        if self.store is None:
            return super().fit(X)  # type: ignore[misc]
        self._fit(X)
        return self

    @common.fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit_predict(self, X: Any, y: Any = None) -> Array:
        """As `fit`, and the most probable component of every sample.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        ndarray of shape (n_samples,), int64
        """
        labels: Array
        if self.store is None:
            self._started_afresh()
            labels = super().fit_predict(X)  # type: ignore[misc]
            return labels
        _, log_resp = self._e_step(self._fit(X))  # type: ignore[attr-defined]
        labels = np.argmax(log_resp, axis=1)
        return labels

    def _fit(self: Any, X: Any) -> Any:
        """Fit in the store; returns the data as they were checked."""
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
        state = self._fit_in_store(em)
        parameters, bounds = em.result()
        self._set_parameters(parameters)
        self.n_iter_ = n = state.best_iterations
        self.converged_ = has_converged(bounds, n, self.tol)
        self.lower_bounds_ = [bound(bounds, i) for i in range(1, n + 1)]
        self.lower_bound_ = self.lower_bounds_[-1] if n else -np.inf
        if n and not self.converged_:
            warnings.warn(
                "Best performing initialization did not converge. Try different init parameters, or increase "
                "max_iter, tol, or check for degenerate data.",
                common.ConvergenceWarning,
                stacklevel=4,
            )
        return X


class GaussianMixture(_Mixture, _sklearn.SklearnGaussianMixture):
    """scikit-learn's GaussianMixture, with the state of the fit in a store.

    ``fit`` and ``fit_predict`` commit after every iteration, or as `commit_every` says. The same again, in another
    process if this one was killed, goes on after the last commit; when the fit had finished, it loads the result. The
    result is the same as that of scikit-learn's own GaussianMixture with the same parameters and the same number of
    threads, bit for bit.

    Parameters
    ----------
    n_components, covariance_type, tol, reg_covar, max_iter, n_init, init_params, weights_init, means_init, \
    precisions_init, random_state, warm_start, verbose, verbose_interval
        As in :class:`sklearn.mixture.GaussianMixture`. With a store and ``random_state=None`` a seed is drawn once and
        kept there, so that ``fit`` again gives the same result.

        With ``warm_start=True`` a second ``fit`` of the same estimator starts where the first one ended. That start is
        a part of what the fit depends on: with ``name=None`` each of them has a slot of its own, and a program that
        is run again after a kill loads the first and goes on with the second. A `name` holds one of them only.
    store, name, commit_every
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
        Of the mean log-likelihood of a sample, after each iteration of the best run.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features_in_,)
        All as in :class:`sklearn.mixture.GaussianMixture`. Copies: they don't refer to the store.
    resumed_from_run_, resumed_from_iter_ : int
        The run (of ``n_init``, from 0) that ``fit`` found in the store, and how many iterations of that run were done.
        0 and 0 when it started afresh.

    Raises
    ------
    FingerprintMismatchError, TransactionError, StoreLockedError
        By ``fit``, ``fit_predict`` and ``reset``, as in :class:`pmstore.cluster.KMeans`.

    Notes
    -----
    The store gains ``weights_``, ``means_`` and ``covariances_``; with ``n_init`` > 1 those of the best run, too.
    ``precisions_cholesky_``, as large as the covariances, is computed from them when a fit is resumed or loaded: the
    same bits, by the same function. In float64, that leaves n_components × n_features² × 8 bytes per iteration for
    "full". ``fit`` doesn't compute the labels that scikit-learn's throws away.

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


class BayesianGaussianMixture(_Mixture, _sklearn.SklearnBayesianGaussianMixture):
    """scikit-learn's BayesianGaussianMixture, with the state of the fit in a store.

    All that :class:`GaussianMixture` promises holds here as well.

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
    The store gains ``weight_concentration_``, ``mean_precision_``, ``means_``, ``degrees_of_freedom_`` and
    ``covariances_``. The priors are computed from the data whenever ``fit`` is called.

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
