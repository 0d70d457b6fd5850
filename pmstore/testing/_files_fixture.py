"""The fixture ``crash_files``: crash tests for any code that saves files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pmstore.testing import _session
from pmstore.testing._files_describe import describe_failure
from pmstore.testing._files_explore import Options
from pmstore.testing._files_judge import FunctionCheck, Judge
from pmstore.testing._files_record import record
from pmstore.testing._files_run import FilesReport, judge_recording, load_kept

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
    ) -> FilesReport:
        """Runs a program once and judges the states that crashes of it leave.

        Parameters
        ----------
        program : sequence of str, or function
            A command, in which ``{dir}`` stands for the directory; or a function that is called with it in a child
            process (a fork: what it changes in memory is not seen here, and threads of this process do not run there).
        check : function of (directory, said)
            Looks at a crash image in a directory of its own. `said` is what the program had printed by then: what it
            had acknowledged. Fails by raising, or by returning False or a sentence.
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
        options = Options(
            filesystem, sector, stale, self.budget if budget is None else budget, self.seed if seed is None else seed
        ).verified()
        command = program if callable(program) else [str(word).replace("{dir}", str(self.dir)) for word in program]
        recording = record(command, self.dir, allow_threads=allow_threads)
        again = _session.test_line(options.budget, options.seed)
        report = judge_recording(
            recording,
            FunctionCheck(check),
            options,
            replay=lambda path: again or f'CrashFiles(directory).replay("{path}", check)',
        )
        _session.keep_report(str(report))
        return report

    def replay(self, path: str | Path, check: Callable[[Path, str], Any]) -> None:
        """Shows the check a failure that was kept, again: raises what `run` raised, if it still fails.

        Raises
        ------
        AssertionError
            The check still does not accept it.
        CrashTestError
            The file holds no failure, or was written in another version of the format.
        """
        __tracebackhide__ = True
        kept = load_kept(Path(path))
        state = kept.found.state
        with Judge(FunctionCheck(check)) as judge:
            text = judge(kept.model.image(state.point, state.lost), kept.model.said(state.point))
        if text is not None:
            raise AssertionError(describe_failure(kept.model, kept.found._replace(text=text)))
