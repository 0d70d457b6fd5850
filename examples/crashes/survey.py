"""Files after crashes, saved in various ways: the tables and findings of docs/what-crashes-leave.md.

python examples/crashes/survey.py NAME…     evaluates these savers of save.py and prints the findings
python examples/crashes/survey.py --write   evaluates all of them and writes the generated part of the document

Each saver's program runs once and is recorded. Then the states that its crashes may leave are built and read, in both
models of a file system. --budget: distinct states for each saver and model (default 800).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import platform
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from save import SAVERS, Saver, WrongDataError

from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._files.describe import describe_failure, describe_tally
from pmstore.testing._files.evaluator import Evaluator
from pmstore.testing._files.explore import Options, Tally, explore, shrink
from pmstore.testing._files.model import Model
from pmstore.testing._files.record import record

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "docs" / "what-crashes-leave.md"
BEGIN, END = "<!-- written by examples/crashes/survey.py: begin -->", "<!-- end -->"
MODELS = ("posix", "ext4")
PACKAGES = {"joblib.dump": "joblib", "h5py": "h5py", "zarr": "zarr", "safetensors": "safetensors", "lmdb": "lmdb"}
NOT_WHOLE = ("unreadable", "mixed or wrong data, unnoticed", "the reader crashes")
PATIENCE = 20  # seconds for one reader


class Result(NamedTuple):
    """The results of one saver in one model."""

    counts: Counter[str]
    tally: Tally
    examples: list[str]
    events: int


def read(saver: Saver, directory: Path) -> tuple[str, str]:
    """The result of a reader: ("version", k), or a word of NOT_WHOLE and the complaint."""
    try:
        return "version", str(saver.load(directory))
    except WrongDataError as error:
        return NOT_WHOLE[1], str(error)
    except Exception as error:
        return NOT_WHOLE[0], f"{type(error).__name__}: {error}".rstrip(": ")


def read_apart(saver: Saver, directory: Path) -> tuple[str, str]:
    """The same in a process of its own, for readers that damaged files may crash or hang."""
    incoming, outgoing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(incoming)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            signal.alarm(PATIENCE)
            os.write(outgoing, "\0".join(read(saver, directory)).encode()[:4000])
        os._exit(0)
    os.close(outgoing)
    with os.fdopen(incoming, "rb") as stream:
        said = stream.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not said:
        return NOT_WHOLE[2], signal.Signals(-status).name if status < 0 else f"status {status}"
    word, _, text = said.partition("\0")
    return word, text


def outcome(saver: Saver, directory: Path, said: bytes) -> tuple[str, str]:
    """A word for a crash state, and the details: "fine", "acknowledged lost", or one of NOT_WHOLE."""
    acknowledged = int(said.split()[-1]) if said else 0
    word, text = (read_apart if saver.apart else read)(saver, directory)
    if word != "version":
        return word, text
    if int(text) < acknowledged:
        return "acknowledged lost", f"version {acknowledged} was said to be saved, version {text} is there"
    return "fine", ""


def survey(name: str, filesystem: str, budget: int) -> Result:
    """Records a saver, and reads the states that its crashes leave."""
    saver = SAVERS[name]
    with contextlib.suppress(ImportError):
        importlib.import_module(PACKAGES.get(name.partition("-")[0], "pmstore"))  # imported once, not in each reader
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "files"
        directory.mkdir()
        program = [sys.executable, str(HERE / "save.py"), name, str(directory)]
        record([*program, "--prepare"], directory, allow_threads=saver.threads)
        recording = record(program, directory, allow_threads=saver.threads)
    options = Options(filesystem=filesystem, budget=budget)
    model = Model(recording, options.filesystem, options.sector)
    counts: Counter[str] = Counter()
    first: dict[str, int] = {}

    def count(image: Path, said: bytes) -> None:
        word = outcome(saver, image, said)[0]
        first.setdefault(word, counts.total())
        counts[word] += 1

    with Evaluator(count) as evaluate:
        tally, _ = explore(model, evaluate, options)
    examples = []
    for words in (NOT_WHOLE, ("acknowledged lost",)):
        numbers = [first[word] for word in words if word in first]
        if numbers:
            examples.append(example(saver, model, options, words, min(numbers)))
    return Result(counts, tally, examples, len(recording.events))


def example(saver: Saver, model: Model, options: Options, words: tuple[str, ...], number: int) -> str:
    """The smallest crash that shows one of these outcomes, starting from the state of this number."""
    seen = 0

    def is_it(image: Path, said: bytes) -> str | None:
        nonlocal seen
        seen += 1
        return "it" if seen == number + 1 else None

    def fails(image: Path, said: bytes) -> str | None:
        word, text = outcome(saver, image, said)
        return f"{word}: {text}" if word in words else None

    with Evaluator(is_it) as evaluate:
        _, found = explore(model, evaluate, options)
    if found is None:
        raise RuntimeError("the second search was not like the first")
    with Evaluator(fails) as evaluate:
        text = evaluate(model.image(found.state.point, found.state.lost), model.said(found.state.point))
        return describe_failure(model, shrink(model, evaluate, found._replace(text=text or "")))


def cells(result: Result) -> tuple[str, str]:
    """The two cells of a model: is the state old or new, and are acknowledged versions kept?"""
    wrong = [word for word in NOT_WHOLE if result.counts[word]]
    whole = "**no**: " + "; ".join(f"{word} ({result.counts[word]})" for word in wrong) if wrong else "yes"
    lost = result.counts["acknowledged lost"]
    return whole, f"**no** ({lost})" if lost else "yes" if not wrong else "where it can be read"


def table(results: dict[str, dict[str, Result]]) -> list[str]:
    """One line for each saver."""
    lines = [
        "| saved by | posix: old or new, whole? | acknowledged kept? | ext4: old or new, whole? | acknowledged kept? "
        "| states |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        states = " + ".join(
            f"{found[m].tally.evaluated}{' (all)' if found[m].tally.exhaustive else ''}" for m in MODELS
        )
        lines.append(f"| `{name}` | {' | '.join(' | '.join(cells(found[m])) for m in MODELS)} | {states} |")
    return lines


def details(name: str, found: dict[str, Result]) -> list[str]:
    """The command, and the smallest crash that shows each kind of failure."""
    lines = [f"### {name}", "", "```text", f"python examples/crashes/survey.py {name}"]
    before: list[str] = []
    for model in MODELS:
        result = found[model]
        lines.append(f"{model}: {describe_tally(result.tally)}, in a run of {result.events} events")
        if result.examples == before and before:
            lines.append("as above")
        else:
            lines += "\n".join(result.examples).splitlines()
        before = result.examples
    return [*lines, "```", ""]


def versions() -> str:
    """The versions of the packages."""
    found = [f"Linux {platform.release().split('-')[0]}", f"Python {platform.python_version()}"]
    for package in ("numpy", *PACKAGES.values(), "pmstore"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join([*found, f"SQLite {sqlite3.sqlite_version}"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SAVERS)}")
    parser.add_argument("--budget", type=int, default=800)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in SAVERS]
    if unknown:
        parser.error(f"no saver {unknown[0]!r}; there are {', '.join(SAVERS)}")
    results: dict[str, dict[str, Result]] = {}
    for name in chosen.names or list(SAVERS):
        try:
            results[name] = {model: survey(name, model, chosen.budget) for model in MODELS}
        except CrashTestError as error:
            if "ModuleNotFoundError" not in str(error) or chosen.write:
                raise
            print(f"{name}: not installed: pip install 'pmstore[crashes]'", file=sys.stderr)
            continue
        if not chosen.write:
            print("\n".join(details(name, results[name])), flush=True)
        print(name, *(dict(results[name][model].counts) for model in MODELS), file=sys.stderr, flush=True)
    if chosen.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        generated = [BEGIN, "", f"{versions()}.", "", *table(results), "", "## The least crash that shows it", ""]
        for name, found in results.items():
            generated += details(name, found)
        DOCUMENT.write_text(before + "\n".join([*generated, END]) + after, encoding="utf-8")
    else:
        print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
