"""The rules of the code base that a program can check: layers, the only code that writes durable bytes, sizes,
docstrings."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
C_FILES = sorted((ROOT / "csrc").rglob("*.[ch]"))
PACKAGE = sorted(path for path in (ROOT / "pmstore").rglob("*.py*") if path.suffix in {".py", ".pyi"})
FOLDERS = ("csrc", "pmstore", "tests", "examples", "benchmarks", "paper", "docs", "fuzz", ".ci")
TEXTS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".c", ".h", ".py", ".pyi", ".md", ".sh", ".ipynb", ""} and path.is_file()
) + sorted(path for path in ROOT.iterdir() if path.suffix in {".md", ".py", ".toml", ".in"} or path.name == "Makefile")

# The folders of csrc, from the bottom up. A file includes headers of its own folder, and of those that are named here.
C_ROOMS: dict[str, set[str]] = {
    "base": set(),
    "codecs": set(),
    "media": {"base"},
    "dirty": {"base"},
    "log": {"base", "media"},
    "space": {"base", "media", "dirty"},
    "commit": {"base", "media", "dirty", "log", "space"},
    "recovery": {"base", "media", "log", "space", "commit"},
    "store": {"base", "media", "log", "space", "commit", "recovery"},
    "reader": {"base", "media", "dirty", "log", "space", "commit", "recovery"},
    "explore": {"base", "media"},
    "python": set(),
}

# The same for Python: the folders and modules of pmstore, from the bottom up, and what each may import.
PYTHON_ROOMS: dict[str, set[str]] = {
    "_errors": set(),
    "_interrupts": set(),
    "_locks": set(),
    "_pmcore": set(),
    "_core": {"_errors", "_interrupts", "_locks", "_pmcore"},
    "_snapshot": {"_core", "_errors"},
    "_trace": {"_core", "_errors"},
    "_display": {"_errors"},
    "_values": {"_core", "_errors"},
    "_catalog": {"_core", "_display", "_errors", "_interrupts", "_locks", "_values"},
    "_derived": {"_catalog", "_core", "_display", "_errors", "_interrupts", "_locks", "_values"},
    "_store": {
        "_catalog",
        "_core",
        "_derived",
        "_display",
        "_errors",
        "_interrupts",
        "_locks",
        "_snapshot",
        "_trace",
        "_values",
    },
    "_shelf": {"_errors", "_locks", "_store"},
    "_interchange": {"_catalog", "_core", "_display", "_errors", "_interrupts", "_store", "_values"},
    "_resume": {"_errors", "_interrupts", "_locks", "_store", "_values"},
    "codecs": {"_core", "_errors"},
    "archive": {
        "_catalog",
        "_core",
        "_derived",
        "_display",
        "_errors",
        "_interchange",
        "_interrupts",
        "_locks",
        "_snapshot",
        "_store",
        "_values",
        "codecs",
    },
    "scale": {"_errors", "_interrupts", "_resume", "_store", "_values", "archive"},
    "cluster": {"_errors", "_resume", "_values", "scale"},
    "decomposition": {"_errors", "_resume", "scale"},
    "mixture": {"_errors", "_resume", "cluster", "scale"},
    "torch": {"_catalog", "_core", "_errors", "_interrupts", "_resume", "_store", "_values", "archive"},
    "_watch": {"_catalog", "_display", "_errors", "_resume", "_store"},
    "testing": {"_catalog", "_core", "_display", "_errors", "_resume", "_store", "_trace", "_values", "scale"},
    "_doctor": {"_display"},
    "_dump": {"_display", "_errors", "_store", "_values"},
    "_cli": {"_display", "_doctor", "_dump", "_interchange", "_store", "_values", "_watch", "archive", "testing"},
    "__main__": {"_cli"},
}

# Inside of a folder, from the bottom up: a file uses those of its own line, and of the lines before it.
C_ORDER = {
    "base": ["status schedule search", "thread", "helper", "format address", "hash compare"],
    "media": ["domain lines", "trace", "media memory dax file direct_io file_system again read"],
    "dirty": ["page_set", "tracker", "policy"],
    "log": ["writer", "log"],
    "space": [
        "region_state",
        "overlay region_fork",
        "region region_map region_read",
        "region_image page extent",
        "heap node",
        "slots catalog leaves",
    ],
    "commit": [
        "parallel_compare",
        "gather",
        "store_state",
        "failed readers",
        "image",
        "async",
        "checkpoint",
        "uncommitted write_back",
        "candidates direct only write_slots",
        "transaction pending",
    ],
    "recovery": ["recovery verify", "salvage"],
    "store": ["forks entries", "new_file store"],
    "reader": ["reader", "page_hashes", "source", "parts", "pages", "contents", "snapshot", "save", "follow"],
    "explore": ["tracer crash", "model", "sandbox", "evaluate", "explorer", "state", "prune", "explore states replay"],
    "python": ["lock rows", "transaction"],
}
PYTHON_ORDER = {
    "_catalog": [
        "kinds live names undo",
        "declaration lost_updates rows",
        "attributes growing listing lists objects catalog",
        "copying",
        "__init__",
    ],
    "_derived": ["decision verify", "inputs derived arrays", "__init__"],
    "_store": [
        "elsewhere header lineage notes only reading",
        "held report callers",
        "naming commits",
        "cores opening",
        "file_format new_store",
        "backup compacting",
        "mapping following lost_work store entrance",
        "hooks salvaging",
        "__init__",
    ],
    "archive": [
        "_place _tuning",
        "_shared",
        "_local _fsspec",
        "_retrying",
        "_objects _sizes _codecs",
        "_format _capture _groups _manifest",
        "_index _aggregated",
        "_sources _aggregate",
        "_versions",
        "_copying _retention _writing",
        "_target",
        "_past _differences _export _verifying",
        "_steps",
        "_drain",
        "_begin",
        "_archive",
        "_latest",
        "__init__ _command",
    ],
    "_interchange": [
        "target forms",
        "source found",
        "text scales",
        "hdf5 npz safetensors zarr",
        "formats",
        "exporting importing",
        "__init__ command xarray",
    ],
    "_resume": [
        "__init__ blas",
        "sklearn fingerprint fit_group history callbacks state loop batches attributes learners partial_fit",
        "fit",
    ],
    "scale": [
        "_tree _shards _messages _travel _routes _memory _frames",
        "_lazy _copies _gather",
        "_local",
        "_holder",
        "_engine _worker _work",
        "_broadcasts",
        "_epochs _processes _prune _dask",
        "_engines",
        "_mapreduce",
        "_fit",
        "__init__",
    ],
    "torch": [
        "_tensors _layout _memory _sampler",
        "_extra _modules _processes _topk _rest _worker",
        "_optimizers _full",
        "_ranks _states _log _checks _changes _replica",
        "_replica_log",
        "_persist _gradlog",
        "__init__",
        "lightning transformers",
    ],
    "codecs": ["_passes _planes", "_lcdelta", "__init__"],
    "testing": ["_pmexplorer _base", "_store", "_faults _files _scale", "_explorer", "__init__ _command _decorator"],
}

# What the package's own face hands on.
FACE = {
    "archive",
    "codecs",
    "_shelf",
    "_catalog",
    "_derived",
    "_errors",
    "_interchange",
    "_resume",
    "_store",
    "_values",
    "_watch",
    "scale",
    "testing",
    "torch",
}

# The rooms that use this face, as programs do. Nothing imports them with pmstore, except a crash test that records.
USES_THE_FACE = ["testing", "_doctor", "_dump", "_cli", "__main__"]

MOST_LINES = 600
MOST_COLUMNS = 120


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """A test of all files, which names those that fail. Thousands of tests would take longer to report than to run."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    wrong.append(f"{path.relative_to(ROOT)}: {error}")
            assert paths
            assert not wrong, "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def without_comments(source: str) -> str:
    """C code without comments and without the contents of strings."""
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda m: '""' if m[0].startswith('"') else " ", source, flags=re.DOTALL)


def test_the_tour_names_every_file() -> None:
    core, package = (ROOT / "docs" / "source.md").read_text(encoding="utf-8").split("## Python")
    for text, folder in ((core, ROOT / "csrc"), (package, ROOT / "pmstore")):
        cells = " ".join(re.findall(r"^- (`.*?):", text, re.MULTILINE | re.DOTALL))
        named = [path for pattern in re.findall(r"`([^`]+)`", cells) for path in matching(folder, pattern)]
        inside = {path for path in PACKAGE if set(path.parents) & set(named)}
        files = {path for end in ("*.[ch]", "*.py", "*.pyi") for path in folder.rglob(end)} - {folder / "__init__.py"}
        assert {path for path in named if path.is_file() and path.is_relative_to(folder)} | inside == files


def matching(folder: Path, pattern: str) -> list[Path]:
    found = list(folder.parent.glob(pattern[3:]) if pattern.startswith("../") else folder.glob(pattern))
    assert found, f"there is no {pattern}"
    return found


def rank(order: dict[str, list[str]], room: str, name: str) -> int:
    """The rank of a file in its folder; all are of one rank in a folder without an order."""
    lines = order.get(room, [name])
    found = [number for number, line in enumerate(lines) if name in line.split()]
    assert len(found) == 1, f"{room}/{name} has no place in the order of {Path(__file__).name}"
    return found[0]


def in_order(rooms: dict[str, set[str]]) -> set[str]:
    """All of them, if each uses only what stands before it."""
    before: set[str] = set()
    for room, others in rooms.items():
        assert others <= before, room
        before.add(room)
    return before


# ---- C


@each(C_FILES)
def test_c_layers_point_downward(path: Path) -> None:
    room = path.parent.name
    text = path.read_text(encoding="utf-8")
    assert room == "python" or "<Python.h>" not in text, "the core knows nothing of Python"
    headers = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE)
    if room == "csrc":
        assert path.name == "pmstore.h" and not headers
        return
    for header in headers:
        other, _, name = header.partition("/")
        assert other in {"pmstore.h", room} | C_ROOMS[room], f"{path.name} must not include {header}, of a higher layer"
        if other == room:
            own, its = (rank(C_ORDER, room, stem) for stem in (path.stem, Path(name).stem))
            assert its <= own, f"{path.name} must not include {header}, which is above it"


def test_no_room_of_c_is_above_itself() -> None:
    assert in_order(C_ROOMS) == {
        path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name[0] != "_"
    }


# Functions whose names begin otherwise: the words that every file uses, and what is declared to Python.
C_OTHER_PREFIXES = {
    "base/status.h": r"pm_fail|pm_fail_errno|pm_check_failed",
    "base/hash.h": r"pm_crc32c",
    "base/format.h": r"pm_(keyed_checksum|round_up|digest_\w+|extent_\w+|item_pack)",
    "explore/crash.h": r"pm_crash_\w+",
    "reader/reader.h": r"pm_(snapshot|source|save)_\w+",
}


@each([path for path in C_FILES if path.suffix == ".h" and path.parent.name != "csrc"])
def test_a_function_s_prefix_names_its_file(path: Path) -> None:
    """Its own, the first part of it if that is a file as well, or, where a folder's files share one header, that."""
    stem = path.stem
    stems = {stem} | {stem.split("_")[0]} if path.with_name(f"{stem.split('_')[0]}.h").is_file() else {stem}
    other = C_OTHER_PREFIXES.get(str(path.relative_to(ROOT / "csrc")), "-")
    text = without_comments(path.read_text(encoding="utf-8"))
    for name in re.findall(r"^[a-z][\w *]*?\b(\w+)\((?!\()", text, re.MULTILINE):
        named = any(re.fullmatch(rf"(pm_)?{one}\d*(_\w+)?", name) for one in stems)
        assert named or re.fullmatch(other, name), f"{name} of {path.name}"


WRITES_DURABLE_BYTES = re.compile(
    r"\b(?:pwrite(?:64)?|pwritev2?|write|writev|fdatasync|fsync|sync_file_range|syncfs|fallocate|posix_fallocate"
    r"|ftruncate|msync|copy_file_range|splice|vmsplice|_mm\d*_stream_\w+|_mm_clwb|_mm_clflush(?:opt)?"
    r"|__builtin_ia32_movnt\w+|__builtin_nontemporal_store)\s*\(|\bSYS_(?:io_submit|io_uring_enter)\b"
)


@each(C_FILES)
def test_only_media_touch_durable_bytes(path: Path) -> None:
    if path.parent.name == "media" and path.stem != "trace":
        return
    if path.name == "sandbox.c" or path.parent.name == "reader":
        return  # a crash image and a snapshot are in memory; a backup has no name yet
    source = without_comments(path.read_text(encoding="utf-8"))
    if path.stem == "hash":
        source = re.sub(r"_mm\d+_stream_si\d+", "", source)  # to where media says, which alone may ask for it
    else:
        assert "pm_hash64_stream_page" not in source
    found = WRITES_DURABLE_BYTES.findall(source)
    assert not found, f"{path.name} goes around media: {found}"


def test_the_search_for_durable_writes_finds_them() -> None:
    code = without_comments(
        "/* fsync(fd) */ ok = pwritev2 (fd, v, 1, 0, 0); _mm256_stream_si256(p, x); pm_write(s);"
        "syscall(SYS_io_submit, context, 1, &next); syscall(SYS_io_setup, 1, &context);"
    )
    assert WRITES_DURABLE_BYTES.findall(code) == ["pwritev2 (", "_mm256_stream_si256(", "SYS_io_submit"]


@each(C_FILES)
def test_c_checks_stay_on(path: Path) -> None:
    """Python builds extensions with -DNDEBUG, which removes assert()."""
    assert not re.search(r"(?<!_)\bassert\s*\(|<assert\.h>", without_comments(path.read_text(encoding="utf-8")))


def test_exported_functions_are_those_of_the_header() -> None:
    """cffi reads pmstore.h as it stands: nothing that needs the preprocessor may be between its two marks."""
    text = (ROOT / "csrc" / "pmstore.h").read_text(encoding="utf-8")
    inside = text.partition("/* cffi: begin */")[2].partition("/* cffi: end */")[0]
    assert "pm_open(" in inside
    assert not re.search(r"^\s*#", inside, flags=re.MULTILINE)


def test_every_function_of_the_header_has_its_comment() -> None:
    """What it does, its parameters and the statuses beside the usual ones; two that belong together may share one."""
    lines = (ROOT / "csrc" / "pmstore.h").read_text(encoding="utf-8").splitlines()
    functions = [i for i, line in enumerate(lines) if re.match(r"[a-z][\w *]*\bpm_\w+\(", line)]
    assert len(functions) > 50
    assert not [lines[i] for i in functions if not lines[i - 1].endswith(("*/", ";"))]


# ---- Python


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Full names of the modules that a file imports, at any depth, also for types only."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = module.removesuffix(".__init__") if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


@each(PACKAGE)
def test_python_layers_point_downward(path: Path) -> None:
    own, inside = [*path.relative_to(ROOT / "pmstore").with_suffix("").parts, ""][:2]
    allowed = FACE if own == "__init__" else {own} | PYTHON_ROOMS[own]
    for name in imports_of(path):
        package, other, module = [*name.split("."), "", ""][:3]
        if package != "pmstore":
            continue
        if other not in PYTHON_ROOMS:
            assert own in USES_THE_FACE, f"{path.name} must not import {name}: it is below the package's own face"
            continue
        assert other in allowed, f"{path.name} must not import {name}, which is of a higher layer"
        if other == own and own in PYTHON_ORDER:
            its = rank(PYTHON_ORDER, own, module)
            assert its <= rank(PYTHON_ORDER, own, inside), f"{path.name} must not import {name}, which is above it"


def test_no_room_of_python_is_above_itself() -> None:
    there = {path.stem for path in (ROOT / "pmstore").iterdir() if path.suffix in {".py", ".pyi"} or path.is_dir()}
    assert in_order(PYTHON_ROOMS) == there - {"__init__", "__pycache__"}
    assert list(PYTHON_ROOMS)[-len(USES_THE_FACE) :] == USES_THE_FACE


@each(PACKAGE)
def test_one_adapter_to_each_extension(path: Path) -> None:
    adapters = {"_core.py": "_pmcore", "engine.py": "_pmexplorer", "record.py": "_pmexplorer"}
    parts = {part for name in imports_of(path) for part in name.split(".")}
    assert parts & {"_pmcore", "_pmexplorer"} == ({adapters[path.name]} if path.name in adapters else set())
    assert not [name for name in imports_of(path) if name.split(".")[0] == "cffi"]


@each(PACKAGE)
def test_the_adapters_to_scikit_learn(path: Path) -> None:
    if path.name not in ("_sklearn.py", "sklearn.py"):
        kept = ("sklearn",) if path.name == "_holder.py" else ("sklearn", "threadpoolctl")  # workers tell of their BLAS
        assert not [name for name in imports_of(path) if name.split(".")[0] in kept]


@each(PACKAGE)
def test_only_one_folder_imports_torch(path: Path) -> None:
    if path.parent.name != "torch":
        assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"]


def test_importing_pmstore_is_light() -> None:
    slow = [
        "torch",
        "sklearn",
        "scipy",
        "rich",
        "argparse",
        "matplotlib",
        "http",
        "fsspec",
        "numcodecs",
        "h5py",
        "zarr",
    ]
    slow += [f"pmstore.{room}" for room in USES_THE_FACE]
    code = f"import sys, pmstore; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_pmstore_leaves_the_path_as_it_is() -> None:
    code = "import sys; path = list(sys.path); import pmstore, pmstore.testing, pmstore._cli; assert sys.path == path"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "module",
    [
        "pmstore",
        "pmstore.cluster",
        "pmstore.decomposition",
        "pmstore.mixture",
        "pmstore.archive",
        "pmstore.codecs",
        "pmstore.scale",
        "pmstore.testing",
        "pmstore.torch",
    ],
)
def test_public_names_have_docstrings(module: str) -> None:
    if module == "pmstore.torch":
        pytest.importorskip("torch", reason="no torch: make test-torch installs it")
    elif module != "pmstore":
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


FRAGMENT = re.compile(
    r"(?:About|After|As|At|Before|Behind|Beside|Besides|Between|Beyond|By|For|From|If|In|Inside|Into|Like|Of|On|Over"
    r"|Per|Since|Through|To|Until|When|Where|While|Who|Whoever|With|Within|Without)\b"
)
WHO = re.compile(
    r"^who\b|[.:;,(]\s+who(?:ever)?\b|\bwhoever\b|\b(?:and|but|by|or|to|tells?|than|from|for)\s+who\b", re.I
)


def with_docstrings(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, its classes and functions. Expressions hold none of them, and are most of what there is."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from with_docstrings(child)


@each([path for path in TEXTS if path.suffix in {".py", ".pyi"}])
def test_docstrings_begin_with_their_subject(path: Path) -> None:
    """No fragment such as "Of a version.", and no "who" for a process, a thread or a reader."""
    for node in with_docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) or ""
        assert not FRAGMENT.match(text), f"{text[:60]!r} does not begin with its subject or verb"
        who = WHO.search(text)
        assert not who, f"{text[max(0, who.start() - 20) : who.end() + 20]!r} hides its subject"


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


@each(TEXTS)
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


@each(TEXTS)
def test_no_machine_is_named(path: Path) -> None:
    """Nothing in the repository knows where it was written."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"/wo" + r"rk/|/ro" + r"ot/|/ho" + r"me/\w+|(?<!\")\blocal" + r"host\b", text)


def test_numbers_that_are_cited_are_explained() -> None:
    """I1, D7 and their like stand in docs/architecture.md."""
    explained = set(re.findall(r"\*\*([ID]\d+)\*\*", (ROOT / "docs" / "architecture.md").read_text()))
    for path in [*C_FILES, *PACKAGE]:
        cited = set(re.findall(r"\b([ID][1-9]\d?)\b", path.read_text()))
        assert cited <= explained, f"{path.name} cites {sorted(cited - explained)}"
