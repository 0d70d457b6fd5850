"""The fixture ``crash_files``: crash tests for any code that saves files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._files.apart import ApartCheck
from pmstore.testing._files.evaluator import Check, FunctionCheck
from pmstore.testing._files.explore import Options
from pmstore.testing._files.record import record
from pmstore.testing._files.run import FilesReport, evaluate_again, evaluate_recording
from pmstore.testing._store.failure import place_of

__all__ = ["CrashFiles"]


class CrashFiles:
    """Records the changes that a program or a function makes in a directory, and calls a check for its crashes.

    Parameters
    ----------
    directory : Path
        The directory; it is made if it does not exist.
    budget : int
        The number of distinct states that `run` evaluates, unless it is given another one.
    seed : int
        The seed of the sampling if there are more states, unless `run` is given another one.

    Attributes
    ----------
    dir : Path
        The directory, which exists and is empty. Files that are put into it before `run` count as durable.
    """

    def __init__(self, directory: str | os.PathLike[str], *, budget: int = 1000, seed: int = 1) -> None:
        self.dir = Path(directory)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.budget = budget
        self.seed = seed

    def run(
        self,
        program: Sequence[str | Path] | Callable[[Path], Any],
        check: Callable[[Path, str], Any],
        *,
        filesystem: str = "posix",
        sector: int = 512,
        stale: int = 0,
        budget: int | None = None,
        seed: int | None = None,
        allow_threads: bool = False,
        fork: bool = True,
        timeout: float = 60.0,
    ) -> FilesReport:
        """Runs a program once and evaluates the states that its crashes leave.

        Parameters
        ----------
        program : sequence of str, or function
            A command, in which ``{dir}`` stands for the directory; or a function, which is called with it in a child
            process. This is a fork: its changes in memory are not visible here, and threads of this process do not run
            there.
        check : function of (directory, said)
            It reads a crash image in a directory of its own. `said` is the program's output before the crash, and thus
            its acknowledgements. The check fails if it raises, returns False or a sentence, or kills its process.
        filesystem : {"posix", "ext4"}
            The guarantees that the program may rely on: only those of POSIX, or also those of ext4.
        sector : {512, 4096}
            The number of bytes that the disk writes atomically.
        stale : int
            0: space that was never written reads as zeros. Otherwise: the seed of its contents.
        budget, seed : int, optional
            The number of distinct states to evaluate, and the seed of the sampling if there are more states.
        allow_threads : bool
            Allow threads or processes that change the files at the same time; the order of this run is explored.
        fork : bool
            The check runs in a fork of its own for each image, because an image may kill its reader, and what the check
            keeps in memory must not be that of another image. False: it runs in this process, for a debugger, for a
            check that collects results in memory, or for one that needs threads, which a fork does not have.
        timeout : float
            Seconds. A check that takes longer in its fork has failed.

        Returns
        -------
        FilesReport
            The number of states that were evaluated; it can be printed.

        Raises
        ------
        CrashFailure
            A crash that the check did not accept. The message has the losses, the missing sync and the place of the
            image.
        CrashTestError
            The program failed, or can't be recorded, or the check does not accept the finished files.
        """
        __tracebackhide__ = True
        try:
            options = Options(
                filesystem,
                sector,
                stale,
                self.budget if budget is None else budget,
                self.seed if seed is None else seed,
            ).verified()
            evaluating = _apart(check, fork, timeout)
            recording = record(self._command(program), self.dir, allow_threads=allow_threads)
            place = place_of(check)
            again = session.test_line(options.budget, options.seed)
            report = evaluate_recording(
                recording,
                evaluating,
                options,
                lines=lambda folder: [
                    f"replay: python -m pmstore crash replay {shlex.quote(os.fspath(folder))}"
                    if place
                    else f"replay: crash_files.replay({os.fspath(folder)!r}, check)",
                    *([f"again:  {again}"] if again else []),
                ],
                nothing="its function gets the directory as its argument"
                if callable(program)
                else "does its command name it? {dir} stands for it",
                place=[place.module, place.name, place.file] if place else None,
            )
        except (CrashFailure, CrashTestError) as error:
            raise error.with_traceback(None) from None  # the traceback shows the test's own line, not those below it
        session.keep_report(str(report))
        return report

    def _command(self, program: Sequence[str | Path] | Callable[[Path], Any]) -> Sequence[str] | Callable[[Path], Any]:
        if isinstance(program, str | Path):
            raise CrashTestError(
                f"the program is one text, {str(program)!r}: give a list, with a word in each place: "
                f"{shlex.split(str(program))!r}"
            )
        if callable(program):
            return program
        return [str(word).replace("{dir}", str(self.dir)) for word in program]

    def replay(
        self, path: str | Path, check: Callable[[Path, str], Any], *, fork: bool = True, timeout: float = 60.0
    ) -> None:
        """Calls the check again for a failure that was kept. If it still fails, raises the error that `run` raised.

        The failure belongs to the recorded run: a program that was changed since must be `run` again.

        Raises
        ------
        CrashFailure
            The check still does not accept it.
        CrashTestError
            The file holds no failure, or was written in another version of the format.
        """
        __tracebackhide__ = True
        try:
            failure = evaluate_again(Path(path), _apart(check, fork, timeout))
        except CrashTestError as error:
            raise error.with_traceback(None) from None
        if failure is not None:
            raise failure


def _apart(check: Callable[[Path, str], Any], fork: bool, timeout: float) -> Check:
    function = FunctionCheck(check)
    return ApartCheck(function, timeout) if fork else function
