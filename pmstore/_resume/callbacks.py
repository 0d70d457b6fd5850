"""scikit-learn's callbacks: each iteration of a fit is a task, and each run is one if there are several.

Iterations that an earlier process did are tasks, too, without data and a fitted estimator: a progress bar then starts
where the fit was, and no callback computes anything for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Callbacks"]


class Callbacks:
    """Calls the hooks of an estimator's callbacks around the steps of its fit.

    Parameters
    ----------
    estimator : InStore
    fit : Fit
    told : dict
        The objects that all hooks may ask for: X, y, metadata.
    """

    def __init__(self, estimator: Any, fit: Any, told: Mapping[str, Any]) -> None:
        self._estimator, self._fit, self._told = estimator, fit, {"estimator": estimator, **told}
        self._step: Callable[[], Any] = fit.step
        self._root = estimator._init_callback_context(max_subtasks=fit.runs if fit.runs > 1 else fit.max_iter)
        self._root.call_on_fit_task_begin(**self._told)
        self._run: Any = None  # the context of the current run
        self._runs = 0  # those that have begun
        fit.step = self.step
        fit._steps_draw = True  # a callback may draw from the generator that is the estimator's parameter

    def step(self) -> Any:
        """One iteration of the fit."""
        state, fit = self._fit.state, self._fit
        if self._runs <= state.run:
            self._begin_run(state.run, state.iteration)
        task = self._run.subcontext(task_name="iteration")
        task.call_on_fit_task_begin(**self._told)
        figures = self._step()
        task.call_on_fit_task_end(**self._told, reconstruction_attributes=fit.fitted)
        return figures

    def end(self) -> None:
        """The fit is finished, and the estimator has its attributes."""
        self._end_run()
        self._root.call_on_fit_task_end(**self._told, reconstruction_attributes={})

    def _begin_run(self, run: int, iterations: int) -> None:
        while self._runs <= run:
            self._end_run()
            self._run, self._runs = self._root, self._runs + 1
            if self._fit.runs > 1:
                self._run = self._root.subcontext(task_name="run", max_subtasks=self._fit.max_iter)
                self._run.call_on_fit_task_begin(estimator=self._estimator)
        for _ in range(iterations):
            task = self._run.subcontext(task_name="iteration")
            task.call_on_fit_task_begin(estimator=self._estimator)
            task.call_on_fit_task_end(estimator=self._estimator)

    def _end_run(self) -> None:
        if self._run is not None and self._run is not self._root:
            self._run.call_on_fit_task_end(estimator=self._estimator)
