"""The adapter to the parts of scikit-learn that several of pmstore's estimators use, above all private ones.

Everything that pmstore takes from scikit-learn is imported here and in the module of the same name in each family's
package, so that a change of scikit-learn affects one place. The names exist, with these signatures, in scikit-learn
1.5.2 to 1.9.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from joblib.hashing import Hasher
from scipy import __version__ as scipy_version
from sklearn import __version__ as version
from sklearn.base import _fit_context as fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads as openmp_threads
from sklearn.utils._param_validation import HasMethods, Interval, InvalidParameterError
from sklearn.utils.parallel import _get_threadpool_controller as threadpool_controller
from sklearn.utils.validation import _check_sample_weight as check_sample_weight
from sklearn.utils.validation import _is_arraylike_not_scalar as is_arraylike
from sklearn.utils.validation import check_is_fitted

from pmstore._resume.blas import limited_blas, unlimited

__all__ = [
    "COUNT",
    "ENGINE_LIKE",
    "POSITIVE",
    "CallbackSupportMixin",
    "ConvergenceWarning",
    "InvalidParameterError",
    "check_array",
    "check_is_fitted",
    "check_random_state",
    "check_sample_weight",
    "fit_context",
    "hash_as",
    "is_arraylike",
    "is_being_shown",
    "libraries",
    "one_blas_thread",
    "openmp_threads",
    "validate_data",
    "version",
    "versions",
]

POSITIVE = Interval(Real, 0, None, closed="neither")
"""A constraint of a parameter."""

COUNT = Interval(Integral, 1, None, closed="left")
"""A whole number from 1, as a constraint."""

ENGINE_LIKE = HasMethods(["submit", "cancel"])
"""An engine of pmstore.scale, or a dask client, as a constraint."""


def one_blas_thread() -> AbstractContextManager[None]:
    """A context in which BLAS computes in one thread."""
    return limited_blas(threadpool_controller(), 1)


def versions() -> dict[str, str]:
    """The versions of the libraries that estimators compute with. Some versions of SciPy compute decompositions by
    their own code, others by LAPACK.
    """
    return {"scikit-learn": version, "scipy": scipy_version}


def libraries() -> list[dict[str, Any]]:
    """The loaded libraries as ``threadpoolctl`` describes them, with the thread counts that they have outside
    one_blas_thread."""
    return unlimited(threadpool_controller())


def is_being_shown() -> bool:
    """Whether the caller's caller, directly or indirectly, is scikit-learn's code that prints parameters.

    Its printer calls ``repr`` on every parameter and offers no other way to show one.
    """
    frame = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("sklearn."):
        if frame.f_globals["__name__"] == "sklearn.utils._pprint" or frame.f_code.co_name == "_get_params_html":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def hash_as(kind: type, known_by: Callable[[Any], tuple[str, ...]]) -> None:
    """Make ``joblib.hash`` identify objects of a class by the result of a function.

    It hashes the pickle of its argument, and a closed store can't be pickled. Its pickler, unlike all others, has a
    dispatch table of its own.
    """
    Hasher.dispatch[kind] = lambda hasher, known: hasher.save((kind.__qualname__, *known_by(known)))


class _NoCallbacks:
    """scikit-learn has callbacks from 1.9 on."""


if TYPE_CHECKING:
    CallbackSupportMixin = _NoCallbacks
else:
    try:
        from sklearn.callback import CallbackSupportMixin
    except ImportError:
        CallbackSupportMixin = _NoCallbacks


try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before 1.6 it was a method

    def validate_data(estimator: Any, X: Any, **options: Any) -> Any:
        """Check and convert `X`, and record its number of features on the estimator."""
        return estimator._validate_data(X, **options)
