"""Makes the one build that contains every mutant: a copy of the sources in which each can be chosen at run time.

A mutant is a text of the sources and its replacement. The sources know nothing of mutants. If they no longer contain a
text, or contain it twice, an error names the mutant, so that the table is kept up to date.

The environment variable PMSTORE_MUTANT, the name of a mutant, chooses one when a process starts. `choose` of
pmstore/_mutant.py chooses one later, before the process uses a store. Without one the build behaves like the original.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "mutants"
VARIABLE = "PMSTORE_MUTANT"

C_SOURCE = """\
#include <stdlib.h>
#include <string.h>
#include "mutant.h"

int pm_mutant;

static const char *const names[] = {{
{names}
}};

__attribute__((visibility("default"))) void pm_mutant_choose(const char *name)
{{
    for (size_t i = 0; name && i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(name, names[i])) pm_mutant = (int)i + 1;
    if (name && *name && !pm_mutant) abort();
}}

__attribute__((constructor)) static void choose(void)
{{
    pm_mutant_choose(getenv("{variable}"));
}}
"""
C_HEADER = "#ifndef PM_MUTANT_H\n#define PM_MUTANT_H\nextern int pm_mutant;\n#endif\n"
PYTHON_SOURCE = '''\
"""The mutant that was chosen."""

import ctypes
import os
import sys

MUTANT = os.environ.get("{variable}", "")


def choose(name):
    """Choose a mutant in this process and its children. No code that ran before may hold one."""
    os.environ["{variable}"] = name
    for module in [one for key, one in sys.modules.items() if key.partition(".")[0] == "pmstore"]:
        if hasattr(module, "MUTANT"):
            module.MUTANT = name
    for extension in ("pmstore._pmcore", "pmstore._locks", "pmstore.testing._pmexplorer"):
        if extension in sys.modules:
            ctypes.CDLL(sys.modules[extension].__file__).pm_mutant_choose(name.encode())
'''
PYTHON_IMPORT = "from __future__ import annotations\n"


class Mutant(NamedTuple):
    """A deliberate bug.

    name: unique. kinds: letters, as in docs/crash-model.md. file: below the repository. old: a text of it, which `new`
    replaces: statements, if it ends with ";" or "}" (in Python: if it is whole lines), otherwise an expression. sees:
    the problem that a test must notice. within: a text that the file contains once, and `old` in it, if `old` alone is
    ambiguous. also: further changes of the same bug, if another place would make up for one alone. parts: the parts of
    the battery that can notice it, if only these can; the others need not be tried.
    """

    name: str
    kinds: str
    file: str
    old: str
    new: str
    sees: str
    within: str = ""
    also: tuple[Mutant, ...] = ()
    parts: tuple[str, ...] = ()


def part(file: str, old: str, new: str, within: str = "") -> Mutant:
    """One of the further changes of a mutant."""
    return Mutant("", "", file, old, new, "", within)


class Edit(NamedTuple):
    """A text of a file that can be chosen at run time: in characters from `start` to `end`."""

    start: int
    end: int
    name: str
    number: int
    new: str


class MutantError(ValueError):
    """A mutant whose text the sources don't contain once."""


def place_of(mutant: Mutant, text: str) -> tuple[int, int]:
    """The place of the mutant's text in a file's text."""
    frame = mutant.within or mutant.old
    for what, inside in ((frame, text), (mutant.old, frame)):
        if inside.count(what) != 1:
            times = f"{inside.count(what)} times instead of once"
            raise MutantError(f"mutant {mutant.name!r}: {mutant.file} holds its text {times}: {what!r}")
    start = text.index(frame) + frame.index(mutant.old)
    return start, start + len(mutant.old)


def chosen(text: str, edits: Sequence[Edit], python: bool) -> str:
    """The text with a choice at the place of each edit. Edits of one place form a chain; places may be inside
    others."""
    places: dict[tuple[int, int], list[Edit]] = {}
    for edit in edits:
        places.setdefault((edit.start, edit.end), []).append(edit)
    return _rendered(text, 0, len(text), places, python)


def _rendered(text: str, start: int, end: int, places: dict[tuple[int, int], list[Edit]], python: bool) -> str:
    out = []
    done = start
    outer: tuple[int, int] | None = None
    for place in sorted(places, key=lambda place: (place[0], -place[1])):
        if outer is not None and place[0] < outer[1]:
            if place[1] > outer[1]:
                raise MutantError(f"mutants {places[outer][0].name!r} and {places[place][0].name!r} overlap")
            continue
        outer = place
        inside = {p: edits for p, edits in places.items() if place[0] <= p[0] and p[1] <= place[1] and p != place}
        old = _rendered(text, *place, inside, python)
        make = _python if python else _c
        out += [text[done : place[0]], make(old, text, place, places[place])]
        done = place[1]
    return "".join(out) + text[done:end]


def _c(old: str, text: str, place: tuple[int, int], edits: Sequence[Edit]) -> str:
    if text[place[1] - 1] not in ";}":
        for edit in edits:
            old = f"(pm_mutant == {edit.number} ? ({edit.new}) : ({old}))"
        return old
    # In braces: the statement may stand between an if and its else.
    chain = "".join(f"if (pm_mutant == {edit.number}) {{ {edit.new} }} else " for edit in edits)
    # Code in a macro's definition must stay on its line.
    gap = "\n" if "\n" in old else " "
    return f"{{ {chain}{{{gap}{old}{gap}}} }}"


def _python(old: str, text: str, place: tuple[int, int], edits: Sequence[Edit]) -> str:
    start, end = place
    before = text[text.rfind("\n", 0, start) + 1 : start]
    if before.strip() or text[end : end + 1] not in ("\n", ""):
        for edit in edits:
            old = f"(({edit.new}) if MUTANT == {edit.name!r} else ({old}))"
        return old

    def indented(block: str) -> str:
        lines = block.split("\n")
        return "\n".join([before + "    " + lines[0], *("    " + line if line else line for line in lines[1:])])

    out = ""
    for edit in edits:
        word = "elif" if out else "if"
        out += f"{before if out else ''}{word} MUTANT == {edit.name!r}:\n{indented(edit.new)}\n"
    return out + f"{before}else:\n{indented(old)}"


def generated(mutants: Sequence[Mutant], root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Path and text of every source file that has changed, and of the new ones."""
    names = [mutant.name for mutant in mutants]
    if len(set(names)) != len(names):
        raise MutantError(f"two mutants are called {next(name for name in names if names.count(name) > 1)!r}")
    edits: dict[str, list[Edit]] = {}
    texts: dict[str, str] = {}
    for number, mutant in enumerate(mutants, 1):
        for change in (mutant, *mutant.also):
            if change.file not in texts:
                texts[change.file] = (root / change.file).read_text(encoding="utf-8")
            place = place_of(change._replace(name=mutant.name), texts[change.file])
            edits.setdefault(change.file, []).append(Edit(*place, mutant.name, number, change.new))
    yield from written(texts, edits, names)


def written(texts: dict[str, str], edits: dict[str, list[Edit]], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Path and text of the files with edits, and of the files that choose among them."""
    for file, text in texts.items():
        python = file.endswith(".py")
        out = chosen(text, edits[file], python)
        if python:
            if out.count(PYTHON_IMPORT) != 1:
                raise MutantError(f"{file} does not hold {PYTHON_IMPORT!r}, behind which an import could stand")
            out = out.replace(PYTHON_IMPORT, PYTHON_IMPORT + "from pmstore._mutant import MUTANT\n")
        yield file, out
    quoted = "\n".join(f'    "{name}",' for name in names)
    for folder in ("csrc", "csrc/python"):  # an extension each
        yield f"{folder}/mutant.c", C_SOURCE.format(names=quoted, variable=VARIABLE)
        yield f"{folder}/mutant.h", C_HEADER
    yield "pmstore/_mutant.py", PYTHON_SOURCE.format(variable=VARIABLE)


def _fingerprint(files: dict[str, str], root: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted([*(root / "csrc").rglob("*"), root / "setup.py"]):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    for file, text in sorted(files.items()):
        if file.startswith("csrc"):
            digest.update(file.encode() + text.encode())
    return digest.hexdigest()


def fill(file: Path, begin: str, end: str, text: str) -> None:
    """Put a text between two marks of a document."""
    old = file.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise SystemExit(f"{file} does not hold {begin} and {end}")
    new = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL)
    file.write_text(new, encoding="utf-8")


def small_files() -> None:
    """Limit the files of a process that runs a mutant: one that grows a store without end must not fill the memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, hard))  # a test whose files have holes may raise it


def ran(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], limit: float, errors: int = subprocess.STDOUT
) -> tuple[int | None, str]:
    """Exit status of a mutant's process (None: it did not end within that many seconds), and its output. Its
    children are killed, not waited for; its files in memory are removed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=errors, start_new_session=True,
            preexec_fn=small_files,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        remove(process.pid)
        process.wait()
        output.seek(0)
        return status, output.read()


def remove(process: int) -> None:
    """Kill the group of a mutant's process, and remove its files in memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    for left in Path("/dev/shm").glob(f"pmstore-mutant-{process}-*"):
        shutil.rmtree(left, ignore_errors=True)


def build(files: Iterable[tuple[str, str]], target: Path = BUILD, root: Path = ROOT, flags: str = "") -> Path:
    """A copy of the tree with these files in it, compiled anew if its C sources changed. Returns its folder.
    flags: of the compiler, which the target always has.
    """
    texts = dict(files)
    stamp = target / "stamp"
    fingerprint = _fingerprint(texts, root)
    fresh = stamp.exists() and stamp.read_text() == fingerprint
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("csrc", "pmstore", "tests"):
        if not (fresh and folder == "csrc"):
            if folder != "pmstore":
                shutil.rmtree(target / folder, ignore_errors=True)
            shutil.copytree(root / folder, target / folder, ignore=ignored, dirs_exist_ok=True)
    for compiled in list((target / "pmstore").rglob("__pycache__")):  # perhaps of a file of the same size and time
        shutil.rmtree(compiled)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pytest_pmstore.py"):
        if (root / name).exists():
            shutil.copy2(root / name, target / name)
    for file, text in texts.items():
        if not (fresh and file.startswith("csrc")):
            (target / file).write_text(text, encoding="utf-8")
    if not fresh:
        stamp.unlink(missing_ok=True)
        environment = dict(os.environ, PMSTORE_CFLAGS=f"-O1 -w -include {target / 'csrc' / 'mutant.h'} {flags}")
        environment.pop(VARIABLE, None)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        done = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MutantError(f"the build with the mutants does not compile:\n{done.stderr[-4000:]}")
        stamp.write_text(fingerprint)
    return target
