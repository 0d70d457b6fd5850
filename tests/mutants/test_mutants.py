"""A few mutants that the suite must notice; `make mutants` runs all of them (tests/mutants/score.py)."""

from __future__ import annotations

import ast
import contextlib
import importlib
from pathlib import Path

import pytest

from tests.mutants import score
from tests.mutants.build import BUILD, ROOT, Edit, Mutant, MutantError, build, chosen, generated, place_of
from tests.mutants.table import CONTROLS, MUTANTS

# One of every class, with the part of the battery that notices it within a second. make mutants tries them all.
SOME = {"image-before-the-record": "crash", "rollback-leaves-arrays": "model", "directory-not-synced": "creation"}
CONTROL = "control-record-before-its-body"


def test_the_table_keeps_step_with_the_sources() -> None:
    assert len(MUTANTS) >= 60 and len(CONTROLS) >= 8
    files = dict(generated([*MUTANTS, *CONTROLS]))
    for mutant in (*MUTANTS, *CONTROLS):
        assert mutant.file in files
    assert {letter for mutant in MUTANTS for letter in mutant.kinds} >= set("PRTNSLCMFDW")
    for mutant in MUTANTS:
        assert mutant.sees, mutant.name


def in_a_function(mutant: Mutant) -> bool:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    line = text.count("\n", 0, place_of(mutant, text)[0]) + 1
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return any(one.body[0].lineno <= line <= (one.end_lineno or 0) for one in functions)


def test_no_module_runs_a_mutant_when_it_is_imported() -> None:
    """The modules have been imported when `pmstore._mutant.choose` chooses a mutant."""
    changes = [change._replace(name=one.name) for one in (*MUTANTS, *CONTROLS) for change in (one, *one.also)]
    assert [one.name for one in changes if one.file.endswith(".py") and not in_a_function(one)] == []


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_tests_of_the_battery_exist(path: Path) -> None:
    """Otherwise every mutant that reaches the missing one would count as noticed."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            for alias in node.names:
                with contextlib.suppress(ModuleNotFoundError):  # a function
                    modules[alias.name] = importlib.import_module(f"{node.module}.{alias.name}")
    for node in nodes:
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            assert hasattr(module, node.attr), f"{module.__name__} has no {node.attr}"


def test_a_mutant_without_a_place_is_named() -> None:
    mutant = Mutant("lost", "P", "a.c", "x++;", ";", "something")
    with pytest.raises(MutantError, match=r"'lost': a\.c holds its text 0 times"):
        place_of(mutant, "y++;")
    with pytest.raises(MutantError, match="2 times"):
        place_of(mutant, "x++; x++;")
    assert place_of(mutant._replace(within="y; x++;"), "x++; y; x++;") == (8, 12)


def test_mutants_of_one_place_and_inside_one_another() -> None:
    text = "if (a < b) go(a, b);"
    edits = [Edit(4, 9, "one", 1, "a <= b"), Edit(4, 9, "two", 2, "true"), Edit(11, 20, "three", 3, ";")]
    out = chosen(text, edits, python=False)
    assert out == (
        "if ((pm_mutant == 2 ? (true) : ((pm_mutant == 1 ? (a <= b) : (a < b))))) "
        "{ if (pm_mutant == 3) { ; } else { go(a, b); } }"
    )
    assert "(pm_mutant == 4 ? (b) : (a))" in chosen(text, [*edits, Edit(14, 15, "four", 4, "b")], python=False)
    with pytest.raises(MutantError, match="'one' and 'five' overlap"):
        chosen(text, [*edits, Edit(8, 12, "five", 5, "")], python=False)


def test_mutants_of_python() -> None:
    text = "def f():\n    if x > 1:\n        g()\n"
    edits = [Edit(16, 21, "one", 1, "True"), Edit(31, 34, "two", 2, "pass")]
    assert chosen(text, edits, python=True) == (
        "def f():\n    if ((True) if MUTANT == 'one' else (x > 1)):\n"
        "        if MUTANT == 'two':\n            pass\n        else:\n            g()\n"
    )


@pytest.mark.long
@pytest.mark.no_sanitizer  # it builds the extension itself
def test_mutants_are_noticed_and_controls_are_not() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    by_name = {mutant.name: mutant for mutant in (*MUTANTS, *CONTROLS)}
    assert build(generated([*MUTANTS, *CONTROLS])) == BUILD
    for name, part in SOME.items():
        assert score.evaluate(BUILD, by_name[name], parts=(part,)).by, name
    control = score.evaluate(BUILD, by_name[CONTROL], parts=("--quick", "crash", "model"))
    assert control.ended and control.by == ""
    score.close(BUILD)
