"""The fixture ``crash_files``: crash tests for any code that saves files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pmstore.testing import _session
from pmstore.testing._errors import CrashFailure, CrashTestError
from pmstore.testing._failure import place_of
from pmstore.testing._files_apart import ApartCheck
from pmstore.testing._files_explore import Options
from pmstore.testing._files_judge import Check, FunctionCheck
from pmstore.testing._files_record import record
from pmstore.testing._files_run import FilesReport, judge_again, judge_recording

__all__ = ["CrashFiles"]


class CrashFiles:
    """Records what a program or a function does to a directory, and shows every crash of it to a check.

    Attributes
    ----------
    dir : Path
        The directory, which is there and empty. What is put into it before `run` is taken to be durable.
    """

    def __init__(self, directory: Path, *, budget: int = 1000, seed: int = 1) -> None:
        self.dir = directory
        directory.mkdir(parents=True, exist_ok=True)
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
    ) -> FilesReport:
        """Runs a program once and judges the states that crashes of it leave.

        Parameters
        ----------
        program : sequence of str, or function
            A command, in which ``{dir}`` stands for the directory; or a function that is called with it in a child
            process (a fork: what it changes in memory is not seen here, and threads of this process do not run there).
        check : function of (directory, said)
            Looks at a crash image in a directory of its own. `said` is what the program had printed by then: what it
            had acknowledged. Fails by raising, or by returning False or a sentence, or by killing its process.
        filesystem : {"posix", "ext4"}
            What the program may rely on: POSIX alone, or what ext4 does besides.
        sector : {512, 4096}
            The bytes that the disk writes whole.
        stale : int
            0: space that was never written reads as zeros. Otherwise: the seed of what it holds.
        budget, seed : int, optional
            How many distinct states to judge, and the seed of the sampling, where these are not all.
        allow_threads : bool
            Threads or processes that change the files at once are no error; the order of this run is explored.
        fork : bool
            The check runs in a child process, which is forked once: what a crash leaves may kill its reader. False: it
            runs in this process, for a debugger, for a check that gathers something in memory, or one that needs
            threads, which a fork does not have.

        Returns
        -------
        FilesReport
            How much was judged; printing it tells.

        Raises
        ------
        CrashFailure
            A crash that the check did not accept: what was lost, which sync is missing, where the image is.
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
            judging = _apart(check, fork)
            recording = record(self._command(program), self.dir, allow_threads=allow_threads)
            place = place_of(check)
            again = _session.test_line(options.budget, options.seed)
            report = judge_recording(
                recording,
                judging,
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
            raise error.with_traceback(None) from None  # the test's own line, and not what is below it
        _session.keep_report(str(report))
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

    def replay(self, path: str | Path, check: Callable[[Path, str], Any], *, fork: bool = True) -> None:
        """Shows the check a failure that was kept, again: raises what `run` raised, if it still fails.

        It is of the run that failed: a program that was changed since has to be `run` again.

        Raises
        ------
        CrashFailure
            The check still does not accept it.
        CrashTestError
            The file holds no failure, or was written in another version of the format.
        """
        __tracebackhide__ = True
        try:
            failure = judge_again(Path(path), _apart(check, fork))
        except CrashTestError as error:
            raise error.with_traceback(None) from None
        if failure is not None:
            raise failure


def _apart(check: Callable[[Path, str], Any], fork: bool) -> Check:
    function = FunctionCheck(check)
    return ApartCheck(function) if fork else function
