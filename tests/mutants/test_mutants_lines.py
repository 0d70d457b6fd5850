"""Generated mutants: the results of the operators, and the drawing of a sample (tests/mutants/lines.py)."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.mutants import c_changes, lines, python_changes, reach
from tests.mutants.build import Edit, chosen
from tests.mutants.c_changes import Change
from tests.mutants.equivalent import ELSEWHERE, EQUIVALENT
from tests.mutants.equivalent_commit import OF_COMMIT
from tests.mutants.equivalent_media import OF_MEDIA
from tests.mutants.equivalent_reader import OF_READER
from tests.mutants.equivalent_space import OF_SPACE
from tests.mutants.lines import Cover, Outcome, score, scores

C_TEXT = """\
#define LEAST(a) ((a) < 5)
static const int table[] = {1, 2};
enum { MOST = 3 };
struct pair { int a; };

static pm_status grow(struct pair *p, size_t n)
{
    enum { PART = 1 << 4 };
    size_t left = n * 2, *at = &left; /* a + b */
    PM_CHECK(n > 0);
    if (!p || n >= MOST) return pm_fail(PM_CORRUPT, "%d + 1", 7 + 1);
    for (size_t i = 0; i < n; i++) PM_TRY(one(p, i));
    while (left) {
        if (left-- == 4) break;
    }
    p->a += 2;
    return check(p);
}
"""
PYTHON_TEXT = '''\
from __future__ import annotations

LIMIT = 3


class Thing:
    size: int = 4

    def grow(self, n: int = 1) -> int:
        """Not changed."""
        if n < 2 and not self.size:
            raise ValueError(f"{n + 1} is too small")
        for i in range(n):
            if i == 5:
                break
            self.size += i  # more
        return self.size
'''


def changes_of_c() -> list[tuple[int, str, str]]:
    return [(one.line, one.operator, " ".join(one.new.split())) for one in c_changes.changes_of("a.c", C_TEXT)]


def test_operators_of_c() -> None:
    found = changes_of_c()
    for expected in (
        (9, "operator", "n / 2"),
        (9, "constant + 1", "n * (2 + 1)"),
        (11, "negation dropped", "p || n >= MOST"),
        (11, "operator", "!p && n >= MOST"),
        (11, "operator", "!p || n > MOST"),
        (11, "condition negated", "!(!p || n >= MOST)"),
        (11, "status dropped", "return PM_OK;"),
        (11, "statement deleted", "(void)0;"),
        (12, "operator", "i <= n"),
        (12, "assignment", "i--"),
        (12, "error ignored", "(void)(one(p, i));"),
        (14, "operator", "left-- != 4"),
        (14, "jump", "continue;"),
        (16, "assignment", "p->a = 2;"),
        (16, "statement deleted", "(void)0;"),
        (17, "status dropped", "return PM_OK;"),
    ):
        assert expected in found
    assert len(set(found)) == len(found)
    assert min(line for line, _, _ in found) >= 9, "what is no function's code is not changed"
    assert not [one for one in found if one[0] == 10], "checks of what only a bug can do are left alone"
    assert not [new for _, _, new in found if "7 - 1" in new], "nor what is said to people"
    assert (17, "statement deleted", "(void)0;") not in found, "a function that has to return something does"


def test_every_change_of_c_can_be_chosen_at_run_time() -> None:
    changes = list(c_changes.changes_of("a.c", C_TEXT))
    edits = [Edit(one.start, one.end, str(i), i, one.new) for i, one in enumerate(changes, 1)]
    out = chosen(C_TEXT, edits, python=False)
    assert all(f"pm_mutant == {i}" in out for i in range(1, len(edits) + 1))
    assert out.count("{") == out.count("}")
    for change in changes:
        assert C_TEXT[change.start : change.end] == change.old
        assert lines.applied(change, C_TEXT).count("\n") == C_TEXT.count("\n")


def test_operators_of_python() -> None:
    changes = list(python_changes.changes_of("a.py", PYTHON_TEXT))
    found = [(one.line, one.operator, one.new) for one in changes]
    for expected in (
        (11, "operator", "n < 2 or not self.size"),
        (11, "operator", "n <= 2"),
        (11, "negation dropped", "self.size"),
        (11, "condition negated", "not (n < 2 and (not self.size))"),
        (12, "statement deleted", "pass"),
        (14, "operator", "i != 5"),
        (15, "jump", "continue"),
        (16, "assignment", "self.size -= i"),
        (16, "statement deleted", "pass"),
        (17, "result dropped", "return None"),
    ):
        assert expected in found
    assert len(set(found)) == len(found)
    assert {one.function for one in changes} == {"Thing.grow"}
    edits = [Edit(one.start, one.end, str(i), i, one.new) for i, one in enumerate(changes, 1)]
    ast.parse(chosen(PYTHON_TEXT, edits, python=True))


def test_a_seed_draws_the_same_sample() -> None:
    files = ["csrc/commit/parallel_compare.c", "pmstore/_resume/batches.py"]
    drawn = lines.drawn(files, 7)
    assert drawn == lines.drawn(files, 7)
    assert drawn != lines.drawn(files, 8)
    assert {change.file for change in drawn[:40]} == set(files)


@pytest.mark.long
@pytest.mark.parametrize("file", [*reach.C_FILES, *reach.PYTHON_FILES])
def test_there_are_mutants_of_every_file(file: str) -> None:
    changes = lines.changes_of(file)
    assert len({(change.start, change.new) for change in changes}) == len(changes)
    assert len({change.line for change in changes}) >= 5


def test_equivalent_mutants_quote_the_sources() -> None:
    entries = (*EQUIVALENT, *OF_COMMIT, *OF_MEDIA, *OF_READER, *OF_SPACE)
    changes = {file: lines.changes_of(file) for file in {one.file for one in entries}}
    for one in entries:
        stripped = [line.strip() for line in Path(lines.ROOT, one.file).read_text(encoding="utf-8").split("\n")]
        assert one.line in stripped, f"{one.file} no longer holds {one.line!r}"
        assert len(one.why) > 20
        matching = [change for change in changes[one.file] if change.at == one.line]
        assert any(lines.equivalent(change) for change in matching), f"no mutant is {one.line!r}"


def test_what_is_tried_elsewhere_is_there() -> None:
    for file, functions in ELSEWHERE.items():
        names = {change.function for change in lines.changes_of(file)}
        for one in functions.split("|"):
            assert any(re.fullmatch(one, name) for name in names), (file, one)


def test_the_table_names_tests_that_exist() -> None:
    cover = Cover()
    assert len(cover.missing) < len(cover.names) / 20, "run tests/mutants/reach.py"
    assert not {Path(name.partition("::")[0]).stem for name in cover.names} & reach.LEFT_OUT
    change = Change("csrc/log/log.c", "pm_log_open", 1, "", 0, 0, "", "", "")
    tests, parts = cover.tests(change)
    assert tests and "model" in parts
    assert cover.tests(change._replace(function="a_new_one"))[0]


def test_the_table_names_functions_that_exist() -> None:
    for file, entry in json.loads(reach.COVER.read_text(encoding="utf-8"))["files"].items():
        words = set(re.findall(r"\w+", (reach.ROOT / file).read_text(encoding="utf-8")))
        gone = [name for name in entry["tests"] if not words.issuperset(name.split("."))]
        assert not gone, file


def test_the_quicker_tests_come_first_and_slow_parts_last_if_at_all() -> None:
    marks = [reach.Mark("a.c", "grow", f"line {i}") for i in range(4)]
    reached = [
        reach.Reached("t.py::slow", 3.0, [0, 1, 2]),
        reach.Reached("t.py::quick", 0.1, [0, 1]),
        reach.Reached("crash", 5.0, [0]),
        reach.Reached("large", 50.0, [0, 1]),
        reach.Reached("t.py::other", 0.1, []),
    ]
    table = reach.table(marks, reached)
    names = [table["names"][number] for number in table["files"]["a.c"]["tests"]["grow"]]
    assert names == ["t.py::quick", "t.py::slow", "crash"]
    assert table["files"]["a.c"]["never"] == {"grow": ["line 3"]}


def test_new_tests_come_first_and_the_others_keep_their_numbers() -> None:
    old = {
        "names": ["crash", "t.py::old"],
        "files": {"a.c": {"tests": {"grow": [1, 0], "other": [1]}, "never": {"grow": ["line 1", "line 2", "gone"]}}},
    }
    new = {
        "names": ["t.py::new", "t.py::old"],
        "files": {
            "a.c": {
                "tests": {"grow": [1, 0], "other": [], "added": [0]},
                "never": {"grow": ["line 0", "line 2"], "other": ["line 0"], "added": ["line 3"]},
            }
        },
    }
    assert reach.merged(old, new) == {
        "names": ["crash", "t.py::old", "t.py::new"],
        "files": {
            "a.c": {
                "tests": {"grow": [2, 1, 0], "other": [1], "added": [2]},
                "never": {"grow": ["line 2"], "added": ["line 3"]},
            }
        },
    }


def test_functions_that_another_processor_chose_keep_their_tests() -> None:
    old = {
        "names": ["t.py::one", "t.py::two"],
        "files": {"a.c": {"tests": {"wide": [1], "narrow": [], "gone": [0]}, "never": {"wide": ["line 1"]}}},
    }
    new = {
        "names": ["t.py::one"],
        "files": {"a.c": {"tests": {"wide": [], "narrow": [0]}, "never": {"wide": ["line 1", "line 2"]}}},
    }
    assert reach.merged(new, reach.unreached(old, new)) == {
        "names": ["t.py::one", "t.py::two"],
        "files": {"a.c": {"tests": {"wide": [1], "narrow": [0]}, "never": {"wide": ["line 1"]}}},
    }


@pytest.mark.long
def test_what_noticed_a_mutant_of_a_function_is_tried_first_on_its_next_one() -> None:
    cover = Cover()
    change = Change("csrc/log/log.c", "pm_log_open", 1, "", 0, 0, "", "", "")
    tests, parts = cover.tests(change)
    cover.note(change, f"{tests[5]}[parameters]")
    assert cover.tests(change) == ([tests[5], *tests[:5], *tests[6:]], parts)
    assert Cover(["t.py"]).tests(change) == (["t.py"], [])


def test_tests_about_a_file_come_before_those_that_pass_through_it() -> None:
    cover = Cover()
    change = next(one for one in lines.changes_of("csrc/log/log.c") if one.function == "features_known")
    tests = cover.tests(change)[0]
    assert len(set(tests)) == len(tests)
    about = {test.partition("::")[0] for test in tests[lines.FIRST : 3 * lines.FIRST]}
    assert {"tests/golden/test_upgrade.py", "tests/core/test_unreadable_log.py"} <= about


@pytest.mark.parametrize(("output", "noticed"), [("....\n..", False), ("....\n.sF", True), ("E", True), ("", False)])
def test_a_failure_counts_though_the_tests_do_not_end(
    monkeypatch: pytest.MonkeyPatch, output: str, noticed: bool
) -> None:
    monkeypatch.setattr(lines, "run_mutant", lambda *given: (None, output))
    assert bool(lines.of_tests(lines.BUILD, ["tests"], "m0", 1.0).by) == noticed


def test_scores_leave_out_what_is_equivalent() -> None:
    outcomes = [
        Outcome("1", "a.c", "crash: all", "", 1.0),
        Outcome("2", "a.c", "", "all pass", 1.0),
        Outcome("3", "a.c", "", "equivalent", 0.0),
        Outcome("4", "b.c", "crash: all", "", 1.0),
    ]
    assert score(outcomes) == pytest.approx(200 / 3)
    assert "| a.c | 3 | 1 | 1 | 50 % |" in scores(outcomes)
    assert "| all | 4 | 2 | 1 | 67 % |" in scores(outcomes)
