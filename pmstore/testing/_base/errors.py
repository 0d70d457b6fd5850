"""The exceptions of `pmstore.testing`."""

from __future__ import annotations

from typing import Any

from pmstore._errors import Error

__all__ = ["CrashFailure", "CrashTestError"]


class CrashTestError(Error, RuntimeError):
    """A crash test that is impossible in this form: the message has the reason, and a remedy."""


class CrashFailure(AssertionError):
    """A crash that loses or mixes data, or whose result a check does not accept.

    Attributes
    ----------
    path : str or None
        The failure file that was written, for `load_failure` and ``python -m pmstore crash replay``.
    report : CrashReport or None
        The exploration until then.
    """

    def __init__(self, message: str, *, path: str | None = None, report: Any = None) -> None:
        super().__init__(message)
        self.path = path
        self.report = report


for _public in (CrashTestError, CrashFailure):  # the names that tracebacks show
    _public.__module__ = "pmstore.testing"
