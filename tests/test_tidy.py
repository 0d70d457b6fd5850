"""The rules of the code base that a program can check: layers, the one door to durable bytes, sizes, docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "csrc").glob("*.[ch]"))
C_FILES = CORE + sorted((ROOT / "csrc" / "python").glob("*.[ch]"))
PACKAGE = sorted((ROOT / "pmstore").rglob("*.py"))
FOLDERS = ("csrc", "pmstore", "tests", "examples", "benchmarks", "docs", "fuzz", ".ci")
TEXTS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".c", ".h", ".py", ".pyi", ".md", ".sh", ""} and path.is_file()
) + sorted(path for path in ROOT.iterdir() if path.suffix in {".md", ".py", ".toml", ".in"} or path.name == "Makefile")

# A file may include headers of its own rank or of a lower one.
C_RANKS = {
    "status": 0,
    "pmstore": 0,  # the declarations of the C face; store.c defines most of them
    "format": 1,
    "address": 1,
    "trace": 1,
    "schedule": 0,
    "tracer": 0,  # stops other programs at their calls; knows nothing of stores
    "thread": 0,
    "compare": 2,
    "hash": 2,
    "media": 3,
    "log": 4,
    "tracker": 4,
    "watch": 5,
    "region": 5,
    "sieve": 6,
    "heap": 6,
    "slots": 7,
    "catalog": 7,
    "gather": 8,
    "transaction": 9,
    "pending": 10,
    "recovery": 10,
    "verify": 10,
    "store": 11,
    "crash": 12,
}

# The same for Python: a module may import those of its own rank or of a lower one.
PYTHON_RANKS = {
    "_core": 0,
    "_errors": 0,
    "_display": 1,
    "_fingerprint": 3,
    "_estimators": 3,
    "_state": 3,
    "_resumable": 3,
    "_sklearn": 3,
    "_attributes": 3,
    "_batches": 3,
    "_partial_fit": 3,
    "_fit": 4,
    "cluster": 4,
    "mixture": 4,
    "decomposition": 4,
    "testing": 3,
    "_cli": 5,
    "__main__": 6,
}
STORE_RANK = 2  # every other module is part of the store
MOST_LINES = 600
MOST_COLUMNS = 120


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def without_comments(source: str) -> str:
    """C code without comments and without the contents of strings."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda m: '""' if m[0].startswith('"') else " ", source, flags=re.DOTALL)


def rank_of_c(name: str) -> int:
    """media_file.c belongs to media, store_scan.c to store: the longest known prefix counts."""
    parts = name.rpartition(".")[0].split("_")
    for n in range(len(parts), 0, -1):
        if "_".join(parts[:n]) in C_RANKS:
            return C_RANKS["_".join(parts[:n])]
    raise AssertionError(f"csrc/{name} belongs to no layer: add it to C_RANKS in {Path(__file__).name}")


def test_the_tour_names_every_file() -> None:
    core, package = (ROOT / "docs" / "source.md").read_text(encoding="utf-8").split("## Python")
    for text, folder in ((core, ROOT / "csrc"), (package, ROOT / "pmstore")):
        cells = " ".join(re.findall(r"^- (`.*?):", text, re.MULTILINE | re.DOTALL))
        named = [path for pattern in re.findall(r"`([^`]+)`", cells) for path in matching(folder, pattern)]
        inside = {file for path in named if path.is_dir() for file in path.rglob("*.py")}
        files = {path for end in ("*.c", "*.h", "*.py") for path in folder.rglob(end)} - {folder / "__init__.py"}
        assert {path for path in named if path.is_file() and path.is_relative_to(folder)} | inside == files


def matching(folder: Path, pattern: str) -> list[Path]:
    found = list(folder.parent.glob(pattern[3:]) if pattern.startswith("../") else folder.glob(pattern))
    assert found, f"there is no {pattern}"
    return found


# ---- C


@pytest.mark.parametrize("path", CORE, ids=ids(CORE))
def test_c_layers_point_downward(path: Path) -> None:
    if path.name == "pmstore.h":
        return
    rank = rank_of_c(path.name)
    text = path.read_text(encoding="utf-8")
    assert "<Python.h>" not in text, "the core knows nothing of Python"
    for header in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE):
        assert rank_of_c(header) <= rank, f"{path.name} must not include {header}, which is of a higher layer"


WRITES_DURABLE_BYTES = re.compile(
    r"\b(?:pwrite(?:64)?|pwritev2?|write|writev|fdatasync|fsync|sync_file_range|syncfs|fallocate|posix_fallocate"
    r"|ftruncate|msync|copy_file_range|splice|vmsplice|_mm\d*_stream_\w+|_mm_clwb|_mm_clflush(?:opt)?"
    r"|__builtin_ia32_movnt\w+|__builtin_nontemporal_store)\s*\("
)


@pytest.mark.parametrize("path", C_FILES, ids=ids(C_FILES))
def test_only_media_touch_durable_bytes(path: Path) -> None:
    if path.name.partition(".")[0].partition("_")[0] == "media":
        return
    if path.name == "crash_judge.c":
        return  # its file is a crash image in memory
    source = without_comments(path.read_text(encoding="utf-8"))
    if path.stem == "hash":
        source = re.sub(r"_mm\d+_stream_si\d+", "", source)  # to where media says, which alone may ask for it
    else:
        assert "pm_hash64_stream_page" not in source
    found = WRITES_DURABLE_BYTES.findall(source)
    assert not found, f"{path.name} goes around media: {found}"


def test_the_search_for_durable_writes_finds_them() -> None:
    code = without_comments("/* fsync(fd) */ ok = pwritev2 (fd, v, 1, 0, 0); _mm256_stream_si256(p, x); pm_write(s);")
    assert WRITES_DURABLE_BYTES.findall(code) == ["pwritev2 (", "_mm256_stream_si256("]


@pytest.mark.parametrize("path", C_FILES, ids=ids(C_FILES))
def test_c_checks_stay_on(path: Path) -> None:
    """Python builds extensions with -DNDEBUG, which removes assert()."""
    assert not re.search(r"(?<!_)\bassert\s*\(|<assert\.h>", without_comments(path.read_text(encoding="utf-8")))


def test_exported_functions_are_those_of_the_header() -> None:
    """cffi reads pmstore.h as it stands: nothing that needs the preprocessor may be between its two marks."""
    text = (ROOT / "csrc" / "pmstore.h").read_text(encoding="utf-8")
    inside = text.partition("/* cffi: begin */")[2].partition("/* cffi: end */")[0]
    assert "pm_open(" in inside
    assert not re.search(r"^\s*#", inside, flags=re.MULTILINE)


# ---- Python


def imports_of(path: Path) -> list[str]:
    """Full names of the modules that a file imports, at any depth; types-only imports don't count."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = module.removesuffix(".__init__") if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def rank_of_module(name: str) -> int:
    return PYTHON_RANKS.get(name, STORE_RANK)


@pytest.mark.parametrize("path", PACKAGE, ids=ids(PACKAGE))
def test_python_layers_point_downward(path: Path) -> None:
    own = path.relative_to(ROOT / "pmstore").with_suffix("").parts[0]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "pmstore" or len(parts) < 2:
            continue
        other = parts[1]
        if not (ROOT / "pmstore" / other).is_dir() and not (ROOT / "pmstore" / f"{other}.py").is_file():
            continue  # a name of the package itself, or the extension
        rank = PYTHON_RANKS["_estimators"] if own == "__init__" else rank_of_module(own)
        assert rank_of_module(other) <= rank, f"{path.name} must not import {name}, which is of a higher layer"


@pytest.mark.parametrize("path", PACKAGE, ids=ids(PACKAGE))
def test_one_door_to_c(path: Path) -> None:
    doors = {"_core.py": "_pmcore", "_engine.py": "_pmexplorer", "_files_record.py": "_pmexplorer"}
    parts = {part for name in imports_of(path) for part in name.split(".")}
    assert parts & {"_pmcore", "_pmexplorer"} == ({doors[path.name]} if path.name in doors else set())
    assert not [name for name in imports_of(path) if name.split(".")[0] == "cffi"]


@pytest.mark.parametrize("path", PACKAGE, ids=ids(PACKAGE))
def test_the_doors_to_scikit_learn(path: Path) -> None:
    if path.name != "_sklearn.py":
        assert not [name for name in imports_of(path) if name.split(".")[0] in ("sklearn", "threadpoolctl")]


def test_importing_pmstore_is_light() -> None:
    code = "import sys, pmstore; print([m for m in ('sklearn', 'scipy', 'rich', 'argparse') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["pmstore", "pmstore.cluster", "pmstore.decomposition", "pmstore.mixture"])
def test_public_names_have_docstrings(module: str) -> None:
    if module != "pmstore":
        pytest.importorskip("sklearn")
    public = importlib.import_module(module)
    assert public.__doc__
    missing = []
    for name in public.__all__:
        thing = getattr(public, name)
        if not callable(thing):
            continue
        if not inspect.getdoc(thing):
            missing.append(name)
        if not inspect.isclass(thing):
            continue
        for attribute, value in vars(thing).items():
            documented = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
            if documented and not attribute.startswith("_") and not inspect.getdoc(getattr(thing, attribute)):
                missing.append(f"{name}.{attribute}")
    assert not missing


def test_the_package_is_typed() -> None:
    assert (ROOT / "pmstore" / "py.typed").is_file()


# ---- every file


def without_examples(path: Path, lines: list[str]) -> list[str]:
    """A page without its tables, and without what stands between ``` and ```: such lines can't be broken."""
    if path.suffix != ".md":
        return lines
    out, inside = [], False
    for line in lines:
        inside ^= line.startswith("```")
        out.append("" if inside or line.startswith("|") else line)
    return out


@pytest.mark.parametrize("path", TEXTS, ids=ids(TEXTS))
def test_files_are_tidy(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines: can this file still be held in a head?"
    assert not text or text.endswith("\n")
    assert not [n for n, line in enumerate(lines, 1) if line != line.rstrip()], "trailing whitespace"
    if path.name != "Makefile":
        assert "\t" not in text
    assert "\r" not in text
    if path.suffix in {".c", ".h", ".md"}:  # ruff counts those of Python
        wide = [n for n, line in enumerate(without_examples(path, lines), 1) if len(line) > MOST_COLUMNS]
        assert not wide, f"lines of more than {MOST_COLUMNS} columns"
    unfinished = re.findall(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", text)
    assert not unfinished


@pytest.mark.parametrize("path", TEXTS, ids=ids(TEXTS))
def test_no_machine_is_named(path: Path) -> None:
    """Nothing in the repository knows where it was written."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"/wo" + r"rk/|/ro" + r"ot/|/ho" + r"me/\w+|\blocal" + r"host\b", text)


def test_numbers_that_are_cited_are_explained() -> None:
    """I1, D7 and their like stand in docs/architecture.md."""
    explained = set(re.findall(r"\*\*([ID]\d+)\*\*", (ROOT / "docs" / "architecture.md").read_text()))
    for path in [*C_FILES, *PACKAGE]:
        cited = set(re.findall(r"\b([ID][1-9]\d?)\b", path.read_text()))
        assert cited <= explained, f"{path.name} cites {sorted(cited - explained)}"
