"""Damage at rest: sectors that decayed, were lost or misdirected, and files that were cut; one case after the other."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pmstore
from pmstore._display import count_text
from pmstore._store import hooks
from pmstore.testing._base import session
from pmstore.testing._base.errors import CrashFailure, CrashTestError
from pmstore.testing._base.fork import fork, signal_name
from pmstore.testing._store.check import Check, CheckRunner, refused_already, require_check
from pmstore.testing._store.coverage import tallied
from pmstore.testing._store.describe import Contents, Sandbox, contents, differences
from pmstore.testing._store.recording import MEDIA

__all__ = ["KINDS", "SECTOR", "Damage", "DamageReport", "explore_damage"]

Progress = Callable[[int, int], None]

SECTOR = 512
PAGE = 4096
KINDS = ("flip", "zeros", "noise", "stale", "misread", "miswritten", "cut", "longer")
WORDS = {
    "flip": "bit {detail} of byte {at} was flipped",
    "zeros": "{sector} was zeros",
    "noise": "{sector} was noise",
    "stale": "{sector} was that of an older version of the file",
    "misread": "{sector} was read from byte {detail} of the file (misdirected read)",
    "miswritten": "{sector} was written over {other} (misdirected write)",
    "cut": "the file was cut to {at} bytes",
    "longer": "the file had {detail} bytes more at its end",
}
PATIENCE = 120  # seconds for one case; after that it counts as a hang


class Damage(NamedTuple):
    """One piece of damage. kind: one of KINDS; at: the place in the file; detail: the bit of a flip, the sector that a
    misdirected read reads or a misdirected write overwrites, the bytes that are added; seed: of noise.
    """

    kind: str
    at: int
    detail: int = 0
    size: int = SECTOR
    seed: int = 0

    def __str__(self) -> str:
        sector = f"the sector at byte {self.at}" if self.size == SECTOR else f"the page at byte {self.at}"
        other = f"that at byte {self.detail}"
        return WORDS[self.kind].format(at=self.at, detail=self.detail, sector=sector, other=other)

    def is_possible(self, length: int) -> bool:
        """Whether a file of this length can be damaged so."""
        if self.kind not in KINDS or any(not isinstance(number, int) or number < 0 for number in self[1:]):
            return False
        within = self.at < length and self.size > 0 and self.detail < (8 if self.kind == "flip" else length)
        return within or self.kind == "longer"

    def changes(self, image: bytes, older: bytes) -> bool:
        """Whether the damage changes anything: the replacement may equal the sector."""
        if self.kind in ("flip", "noise", "cut", "longer"):
            return True
        at = slice(self.at, self.at + self.size)
        length = len(image[at])
        if self.kind == "zeros":
            return any(image[at])
        if self.kind == "stale":
            return image[at] != older[at].ljust(length, b"\0")
        return image[at] != image[self.detail : self.detail + length]

    def apply(self, image: bytes, older: bytes) -> bytearray:
        """The image with the damage applied."""
        out = bytearray(image)
        end = min(self.at + self.size, len(out))
        length = end - self.at
        if self.kind == "flip":
            out[self.at] ^= 1 << self.detail
        elif self.kind == "zeros":
            out[self.at : end] = bytes(length)
        elif self.kind == "noise":
            out[self.at : end] = random.Random(self.seed).randbytes(length)
        elif self.kind == "stale":
            out[self.at : end] = older[self.at : end].ljust(length, b"\0")
        elif self.kind == "misread":
            out[self.at : end] = image[self.detail : self.detail + length]
        elif self.kind == "miswritten":
            out[self.detail : self.detail + length] = image[self.at : end]
        elif self.kind == "cut":
            del out[self.at :]
        else:
            out += random.Random(self.seed).randbytes(self.detail) if self.seed else bytes(self.detail)
        return out


@dataclass(frozen=True)
class DamageReport:
    """The coverage of `explore_damage`, printed in a few lines.

    Attributes
    ----------
    medium : str
        "memory" or "file".
    evaluated, possible : int
        The number of pieces of damage that were tried, and the number of all: one of each kind for every sector, and
        the ends of the file.
    by_kind : dict of str to int
        The number of each kind among those tried.
    outcomes : dict of str to int
        The number of each outcome: "not opened" (an error was raised), "reported" (by `Store.check`), "harmless" (all
        values are unchanged).
    seed : int
        Of all choices.
    seconds : float
    """

    medium: str
    evaluated: int
    possible: int
    by_kind: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 1
    seconds: float = 0.0

    @property
    def exhaustive(self) -> bool:
        """Whether every sector was damaged in every way."""
        return self.evaluated == self.possible

    def __str__(self) -> str:
        how = "all" if self.exhaustive else "chosen"
        rate = self.evaluated / self.seconds if self.seconds > 0 else 0.0
        return (
            f"damage at rest on {self.medium}: {count_text(self.evaluated, 'case')} of {self.possible:,} ({how}, seed "
            f"{self.seed}), {rate:,.0f} a second\n"
            f"  of the kinds {tallied(self.by_kind)}\n  what became of them: {tallied(self.outcomes)}"
        )


def cases(image: bytes, older: bytes, seed: int) -> list[Damage]:
    """One case of each kind for every sector; also for every page, of the kinds that apply to pages."""
    rng = random.Random(seed)
    out = []
    for size in (SECTOR, PAGE):
        places = range(0, len(image), size)
        for at in places:
            other = rng.choice(places)
            if size == SECTOR:
                out.append(Damage("flip", at + rng.randrange(min(SECTOR, len(image) - at)), rng.randrange(8)))
            out.append(Damage("zeros", at, 0, size))
            out.append(Damage("noise", at, 0, size, rng.getrandbits(32)))
            out.append(Damage("misread", at, other, size))
            out.append(Damage("miswritten", at, other, size))
            if older:
                out.append(Damage("stale", at, 0, size))
    out += [Damage("cut", at) for at in range(0, len(image), SECTOR)]
    out += [Damage("cut", rng.randrange(len(image))) for _ in range(16)]
    for more in (1, SECTOR, PAGE, 1 << 20):
        out += [Damage("longer", len(image), more), Damage("longer", len(image), more, seed=rng.getrandbits(32) | 1)]
    return [one for one in out if one.changes(image, older)]


class _Evaluator:
    """The contents of the undamaged file, and the test whether a damaged one is taken for it."""

    def __init__(self, image: bytes, medium: str, check: Check | None, states: Mapping[int, int]) -> None:
        self._medium = medium
        self._sandbox = Sandbox()
        self._runner = None if check is None else CheckRunner(check, medium, self._sandbox)
        self._path = Path(self._sandbox.directory) / "damaged.pm"
        self._path.write_bytes(image)
        try:
            with self._opened() as store:
                report = store.check()
                if not report.ok:
                    raise CrashTestError(f"the store is damaged before anything was done to it: {report}")
                self._hashes = {**states, store.sequence: hooks.core_of(store).state_hash()}
                self._sequence = store.sequence
                self._contents: Contents = contents(store)
        except pmstore.Error as error:
            self.close()
            if isinstance(error, CrashTestError):
                raise
            raise CrashTestError(f"that is no store that could be damaged: {error}") from error

    def close(self) -> None:
        self._sandbox.close()

    def require_check_passes(self, image: bytes) -> None:
        """Tries the check on the undamaged store, in a fork as for a damaged one."""
        runner = self._runner
        if runner is None:
            return

        def work(begin: Callable[[int], None]) -> _Answer:
            begin(0)
            return _Answer(1, Counter(), runner(image, self._sequence, self._sequence) or "")

        answer = _in_fork(work, lambda done: None)
        if answer.wrong:
            teller = "During the check, " if answer.ended else "It said: "
            raise refused_already(answer.wrong, "damage", "the undamaged store", "store", teller)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[pmstore.Store]:
        store = pmstore.open(self._path, "r+", media=self._medium)  # type: ignore[arg-type]
        try:
            yield store
        finally:
            hooks.kill(store)

    def __call__(self, damaged: bytes | bytearray) -> tuple[str, str]:
        """The outcome; and if that is "wrong", the problem."""
        self._path.write_bytes(damaged)
        try:
            with self._opened() as store:
                report = store.check()
                if not report.ok:
                    with contextlib.suppress(pmstore.Error):
                        contents(store)  # reading must not end the process
                    return "reported", ""
                said = self._difference(store)
                if not said:
                    store["pmstore.testing/probe"] = 1
                    store.commit()
        except pmstore.Error:
            return "not opened", ""
        except Exception as error:
            return "wrong", f"the store raised {type(error).__name__}, which is no pmstore.Error: {error}"
        if not said and self._runner is not None:
            said = self._runner(bytes(damaged), self._sequence, self._sequence) or ""
        return ("wrong", said) if said else ("harmless", "")

    def _difference(self, store: pmstore.Store) -> str:
        hash = hooks.core_of(store).state_hash()
        if self._hashes.get(store.sequence) == hash:
            return ""
        text = f"the store opened and check() found nothing, but it is at commit {store.sequence}"
        if store.sequence != self._sequence:
            return f"{text} instead of {self._sequence}"
        try:
            different = differences(contents(store), self._contents, None, self._sequence, self._sequence)
        except pmstore.Error as error:
            return f"check() found nothing, but reading raised {type(error).__name__}: {error}"
        return f"{text} with other contents: {'; '.join(different[:3]) or 'what is not shown differs'}"


class _Answer(NamedTuple):
    done: int  # cases that were evaluated
    outcomes: Counter[str]
    wrong: str  # the problem of the last case; "" if there is none
    ended: bool = False  # the problem is that the process ended


def _portable(error: CrashTestError) -> CrashTestError:
    """The error; or its text, if pickle can't make one of its class anew."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # code of the class runs
        return CrashTestError(str(error))
    return error


def _in_fork(work: Callable[[Callable[[int], None]], _Answer], progress: Callable[[int], None]) -> _Answer:
    """Runs in a fork of this process, so that a signal there is a result too. `work` reports the case that it
    begins."""
    reader, writer = os.pipe()
    pid = fork()
    if not pid:
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            with open(writer, "wb", buffering=0) as out:

                def begin(number: int) -> None:
                    signal.alarm(PATIENCE)
                    out.write(number.to_bytes(8, "little"))

                try:
                    answer: Any = work(begin)
                except CrashTestError as error:
                    answer = _portable(error)
                except BaseException as error:
                    answer = CrashTestError(f"{type(error).__name__}: {error}")
                out.write((1 << 63).to_bytes(8, "little") + pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writer)
    last = 0
    try:
        with open(reader, "rb") as source:
            while head := source.read(8):
                last = int.from_bytes(head, "little")
                if last >> 63:
                    answer = pickle.loads(source.read())
                    if isinstance(answer, CrashTestError):
                        raise answer
                    assert isinstance(answer, _Answer)
                    return answer
                progress(last)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        status = os.waitpid(pid, 0)[1]
    number = os.waitstatus_to_exitcode(status)
    name = signal_name(-number) if number < 0 else f"exit status {number}"
    how = f"did not come to an end within {PATIENCE} s" if name == "SIGALRM" else f"ended with {name}"
    return _Answer(last + 1, Counter(), f"the process that opened it {how}", ended=True)


def explore_damage(
    source: str | os.PathLike[str] | bytes,
    check: Check | None = None,
    *,
    medium: str,
    seed: int = 1,
    budget: int | None = None,
    older: bytes | None = None,
    states: Mapping[int, int] | None = None,
    kinds: Iterable[str] = KINDS,
    progress: Progress | None = None,
    only: Damage | None = None,
) -> DamageReport:
    """Damage a store's file in one place, for all places and all kinds of damage, and test that no damage goes
    unnoticed.

    Either opening the file raises a `pmstore.Error`, or `Store.check` reports the damage, or the damage does not matter
    and all values are unchanged. Everything else is a failure: changed contents without an error, a crash, or a hang.

    Parameters
    ----------
    source : path or bytes
        The file of a store that was closed, or whose process died.
    check : callable, optional
        As for `CrashExplorer.run`: called for each store that seems valid. Runs in a fork of this process.
    medium : {"memory", "file"}
        The medium to open it on.
    seed : int
        The seed of all choices.
    budget : int, optional
        The number of cases to try; by default all: about five for every sector of 512 bytes, and for every page.
    older : bytes, optional
        An earlier image of the same file. Its sectors replace newer ones, as after a lost write.
    states : dict of int to int, optional
        Earlier states that are valid too (`Recording.states`). In the log of a power cut's image, damage to the last
        commit can't be told from a commit that did not reach the disk.
    kinds : iterable of str
        Only these of "flip", "zeros", "noise", "stale", "misread", "miswritten", "cut" and "longer".
    progress : callable, optional
        Called with the number of cases tried, and the total.
    only : Damage, optional
        Only this one, to reproduce it.

    Raises
    ------
    CrashFailure
        Damage was not noticed, or ended the process. The damaged file was written; the message names it.
    CrashTestError
        The file is no store, it is damaged already, the check refuses it undamaged, or an argument makes no sense.
    """
    require_check(check)
    if medium not in MEDIA:
        raise CrashTestError(f'medium is "memory" or "file", not {medium!r}')
    if budget is not None and budget < 1:
        raise CrashTestError(f"a budget of {budget} tries nothing: give 1 or more, or none for all that there are")
    wanted = frozenset(kinds)
    if not wanted or not wanted <= set(KINDS):
        raise CrashTestError(f"kinds is any of {', '.join(KINDS)}, not {sorted(wanted) or 'none'}")
    image = _image(source)
    if only is not None and not (isinstance(only, Damage) and only.is_possible(len(image))):
        raise CrashTestError(
            f'only is damage within the {len(image)} bytes of the file, such as pmstore.testing.Damage("flip", 600, 3)'
            f", not {only!r:.200}"
        )
    evaluate = _Evaluator(image, medium, check, states or {})
    begun = time.perf_counter()
    try:
        evaluate.require_check_passes(image)
        every = [case for case in cases(image, older or b"", seed) if case.kind in wanted]
        chosen = [only] if only is not None else every
        if budget is not None and budget < len(chosen):
            chosen = random.Random(seed).sample(chosen, budget)

        def work(begin: Callable[[int], None]) -> _Answer:
            outcomes: Counter[str] = Counter()
            for number, damage in enumerate(chosen):
                begin(number)
                outcome, wrong = evaluate(damage.apply(image, older or b""))
                outcomes[outcome] += 1
                if wrong:
                    return _Answer(number + 1, outcomes, wrong)
            return _Answer(len(chosen), outcomes, "")

        answer = _in_fork(work, lambda done: progress(done, len(chosen)) if progress is not None else None)
    finally:
        evaluate.close()
    if answer.wrong:
        damage = chosen[answer.done - 1]
        raise _failure(damage, damage.apply(image, older or b""), answer.wrong, medium, seed)
    kinds = Counter(damage.kind for damage in chosen)
    return DamageReport(medium, len(chosen), len(every), kinds, answer.outcomes, seed, time.perf_counter() - begun)


def _image(source: str | os.PathLike[str] | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise CrashTestError(f"{os.fspath(source)} can't be read: {error.strerror}") from error


def _failure(damage: Damage, damaged: bytes | bytearray, wrong: str, medium: str, seed: int) -> CrashFailure:
    text = f"{damage}, which was not noticed: {wrong}\n  on {medium}, seed {seed}"
    path = session.directory() / f"damage-{damage.kind}-{damage.at}.pm"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damaged)
        text += f"\n  look:  python -m pmstore check {path}"
    except OSError as error:
        text += f"\n  (the damaged file can't be written to {path}: {error.strerror})"
    again = f"only=Damage{tuple(damage)!r}"
    return CrashFailure(f"{text}\n  again: the same call, with {again}", path=os.fspath(path))
