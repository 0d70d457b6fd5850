"""Expectation-maximisation, by scikit-learn's own steps.

Each iteration makes new arrays, which a commit writes once, directly to their place. scikit-learn chooses their dtypes.
For float32 data, or if the caller gives the first parameters, the dtypes of the first iteration may differ from later
ones. Therefore the arrays are values of the state, which keep their dtype.

``precisions_cholesky_`` is as large as the covariances and follows from them, so it isn't stored. If the caller gave
the first precisions, or an earlier fit left the start, it does not follow from the covariances. Then it is stored until
the first iteration is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pmstore._resume import sklearn as common
from pmstore._resume.fingerprint import Fingerprint
from pmstore._resume.fit import Fit
from pmstore._resume.state import Field
from pmstore.mixture import _sklearn

Array = npt.NDArray[Any]

BOUND = np.dtype([("value", "<f8"), ("single", "?"), ("ndim", "u1")])
"""A lower bound; whether it is a float32, because the difference of two float32 is rounded to one; its axes, because
that of a Bayesian mixture with tied covariances is an array of one element."""


class EM(Fit):
    """All runs of expectation-maximisation for a mixture.

    Parameters
    ----------
    estimator : GaussianMixture or BayesianGaussianMixture
        The estimator, checked. It is not changed: the iterations use a copy, so that an interrupted warm start can be
        repeated.
    X : ndarray of shape (n, d), float32 or float64
    names : sequence of str
        The attributes of the estimator that an iteration changes, except precisions_cholesky_.
    """

    version = 1

    def __init__(self, estimator: Any, X: Array, names: tuple[str, ...]) -> None:
        super().__init__(estimator, X, threads=common.openmp_threads())
        self.X, self.names = X, names
        self.warm = estimator.warm_start and hasattr(estimator, "converged_")
        self.runs, self.max_iter = 1 if self.warm else estimator.n_init, estimator.max_iter
        self._steps_draw = not type(estimator).__module__.startswith("pmstore.")  # a user's steps may
        self.model: Any = object.__new__(type(estimator))
        vars(self.model).update(vars(estimator))

    def fingerprint(self) -> Fingerprint:
        """The fingerprint of every fit, the start, and the memory order of the data, which sums may depend on."""
        given = dict(super().fingerprint())
        if self.warm:
            start = (*self.names, "precisions_cholesky_", "lower_bound_")
            given["warm start"] = {name: getattr(self.estimator, name) for name in start}
        if not (self.X.flags.c_contiguous or self.X.flags.f_contiguous):
            given["X strides"] = self.X.strides
        return given

    def fields(self) -> Iterable[Field]:
        """The table of the state."""
        (_, d), k = self.X.shape, self.estimator.n_components
        kind = self.estimator.covariance_type
        covariances = {"full": (k, d, d), "tied": (d, d), "diag": (k, d), "spherical": (k,)}[kind]
        shapes: dict[str, tuple[int, ...]] = {
            "weights_": (k,),
            "weight_concentration_": (),  # an array of (k,), or a tuple of two
            "mean_precision_": (k,),
            "means_": (k, d),
            "degrees_of_freedom_": () if kind == "tied" else (k,),
            "covariances_": covariances,
        }
        if self.warm:  # scikit-learn goes on with the components and the features of the start, or fails
            start = {name: np.shape(getattr(self.estimator, name)) for name in self.names}
            shapes = {**start, "weight_concentration_": ()}
            covariances = np.shape(self.estimator.precisions_cholesky_)
        yield from super().fields()
        for prefix in ("",) if self.runs == 1 else ("", "best/"):
            for name in self.names:
                yield Field(prefix + name, shapes[name], object, self._role(prefix))
            yield Field(f"{prefix}lower_bounds", dtype=object, role=self._role(prefix))  # [i]: after iteration i
        yield Field("precisions_cholesky_", covariances, object, self._role(""))  # None: they follow, see above

    def _role(self, prefix: str) -> Any:
        """The role of a field: the state of the only run is the result."""
        return "best" if prefix else "result" if self.runs == 1 else "working"

    # ---- the algorithm

    def start(self) -> None:
        """The parameters of iteration 0: scikit-learn's, the caller's, or those of the earlier fit."""
        super().start()
        model, state = self.model, self.state
        model._print_verbose_msg_init_beg(state.run)
        if not self.warm:
            for name in (*self.names, "precisions_cholesky_"):
                vars(model).pop(name, None)
            model._initialize_parameters(self.X, self.random_state)
        given = self.warm or getattr(model, "precisions_init", None) is not None
        state.precisions_cholesky_ = model.precisions_cholesky_ if given else None
        state.lower_bounds = np.zeros(16, BOUND)
        self._put_bound(0, model.lower_bound_ if self.warm else -np.inf)
        self._put_parameters()

    def step(self) -> Mapping[str, float]:
        """Responsibilities of the components for the samples, and new parameters from them. The objective is the lower
        bound."""
        model, state, i = self.model, self.state, self.state.iteration + 1
        log_prob_norm, log_resp = model._e_step(self.X)
        model._m_step(self.X, log_resp)
        self._put_bound(i, model._compute_lower_bound(log_resp, log_prob_norm))
        self._put_parameters()
        if i == 1:
            state.precisions_cholesky_ = None
        change = bound(state.lower_bounds, i) - bound(state.lower_bounds, i - 1)
        model._print_verbose_msg_iter_end(i, change)
        return {"objective": state.lower_bounds[i]["value"], "change": np.asarray(change).item()}

    def fitted(self) -> dict[str, Any]:
        """The newest parameters."""
        return {name: getattr(self.model, name) for name in (*self.names, "precisions_cholesky_")}

    def converged(self) -> bool:
        """Whether the last iteration hardly changed the lower bound."""
        return has_converged(self.state.lower_bounds, self.state.iteration, self.estimator.tol)

    def derive(self) -> None:
        """The model as of the last commit."""
        model, state = self.model, self.state
        self._check("", state.iteration)
        model._init_prev_time = model._iter_prev_time = time.time()  # for its messages
        for name in self.names:
            setattr(model, name, state[name])
        model.precisions_cholesky_ = self._precisions_cholesky(state.covariances_, state.precisions_cholesky_)

    def end_run(self) -> None:
        """Print the end of the run, as scikit-learn does."""
        if i := self.state.iteration:
            self.model._print_verbose_msg_init_end(bound(self.state.lower_bounds, i), self.converged())

    def better(self) -> bool:
        """Whether the run's lower bound is higher. Without iterations there is no bound, and the last run is kept."""
        state = self.state
        best = bound(state["best/lower_bounds"], state.best_iterations)
        return bool(bound(state.lower_bounds, state.iteration) > best or best == -np.inf)

    def keep(self) -> None:
        """The run that ended is the best so far."""
        if self.runs > 1:
            for name in (*self.names, "lower_bounds"):
                self.state[f"best/{name}"] = self.state[name]

    # ---- the result

    def result(self) -> tuple[tuple[Any, ...], Array]:
        """Parameters of the best run, in the form of ``_set_parameters``, and its lower bounds before the first and
        after every iteration."""
        prefix = "best/" if self.runs > 1 else ""
        self._check(prefix, self.state.best_iterations)
        parameters = [self.state[prefix + name] for name in self.names]
        stored = None if prefix else self.state.precisions_cholesky_
        cholesky = self._precisions_cholesky(self.state[f"{prefix}covariances_"], stored)
        return (*parameters, cholesky), self.state[f"{prefix}lower_bounds"][: self.state.best_iterations + 1]

    def _precisions_cholesky(self, covariances: Any, stored: Any) -> Any:
        if stored is not None:
            return stored
        try:
            return _sklearn.compute_precisions_cholesky(covariances, self.estimator.covariance_type)
        except (ValueError, AttributeError) as error:  # not positive definite, or None
            raise self.changed("covariances_") from error

    def _check(self, prefix: str, iterations: int) -> None:
        """Refuse stored values with errors that the table of fields can't detect."""
        bounds = self.state[f"{prefix}lower_bounds"]
        if getattr(bounds, "dtype", None) != BOUND or bounds.ndim != 1 or len(bounds) <= iterations:
            raise self.changed("lower_bounds")
        for name in self.names:
            value = self.state[prefix + name]
            if value is None and name == "covariances_" and not iterations:
                continue  # the caller gave precisions instead
            if any(np.asarray(part).dtype.kind != "f" for part in (value if isinstance(value, tuple) else (value,))):
                raise self.changed(name)
        if "weight_concentration_" in self.names:
            value, k = self.state[f"{prefix}weight_concentration_"], len(self.state[f"{prefix}means_"])
            arrays = value if isinstance(value, tuple) and len(value) == 2 else (value,)
            if any(getattr(array, "shape", None) != (k,) for array in arrays):
                raise self.changed("weight_concentration_")

    def _put_parameters(self) -> None:
        for name in self.names:
            self.state[name] = getattr(self.model, name, None)

    def _put_bound(self, i: int, value: Any) -> None:
        bounds = self.state.lower_bounds
        if i == len(bounds):
            bounds = np.append(bounds, np.zeros_like(bounds))
        value = np.asarray(value)
        bounds[i] = value.item(), value.dtype == np.float32, value.ndim
        self.state.lower_bounds = bounds


def bound(bounds: Array, i: int) -> Any:
    """The lower bound after iteration i, as scikit-learn computed it."""
    value, single, ndim = bounds[i].item()
    return np.full((1,) * ndim, value, np.float32 if single else np.float64)[()]


def has_converged(bounds: Array, iterations: int, tolerance: float) -> bool:
    """Whether the last iteration hardly changed the lower bound."""
    return iterations > 0 and bool(abs(bound(bounds, iterations) - bound(bounds, iterations - 1)) < tolerance)
