"""The commands watch and top: what they print, and their errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._watch import follow, terminal
from pmstore._watch.follow import Follower, views
from tests.conftest import Child
from tests.support.restricted import let_others_enter
from tests.watch.conftest import HOSTILE, Falling


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = _cli.main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    status, out, err = run(capsys, *arguments, "--once", "--json")
    assert (status, err) == (0, "") and out.count("\n") == 1
    return dict(json.loads(out))


def test_json(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # is not needed
    view = told(capsys, "watch", path)
    assert (view["path"], view["sequence"], view["writer"], view["more"]) == (str(path), 5, "closed", 0)
    [fit] = view["fits"]
    assert (fit["name"], fit["state"], fit["iteration"], fit["max_iter"]) == ("fits/fall", "closed", 3, 10)
    assert (fit["objective"], fit["starts"], fit["left"]) == (128.0, 1, None) and 0 <= view["age"] <= fit["age"] + 1
    assert {value["name"]: value["text"] for value in view["values"]} == {
        "epoch": "7",
        "losses": "3 items, the last one 1.0",
        HOSTILE: repr(HOSTILE),
    }


def test_it_shows_who_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(path) as store:
        view = told(capsys, "watch", path)
        assert view["writer"] == "alive" and view["fits"][0]["state"] == "running" and view["fits"][0]["left"] > 0
        Falling().run(store, "fits/fall")
        [fit] = told(capsys, "watch", path)["fits"]
        assert (fit["state"], fit["iteration"], fit["starts"]) == ("finished", 10, 2)
        killed = path.with_name("killed.pm")
        killed.write_bytes(path.read_bytes())
        store["epoch"] = 8
    assert told(capsys, "watch", killed)["writer"] == "died"


@pytest.mark.parametrize(
    ("names", "fits", "values"),
    [
        (["fits"], ["fits/fall"], {}),
        (["fits/fall"], ["fits/fall"], {}),
        (["model"], [], {"model/w": "(3, 4) float64"}),
        (["fits/fall/finished", "model/w"], [], {"fits/fall/finished": "False", "model/w": "(3, 4) float64"}),
    ],
)
def test_names_limit_it(
    path: Path, capsys: pytest.CaptureFixture[str], names: list[str], fits: list[str], values: dict[str, str]
) -> None:
    view = told(capsys, "watch", path, *names)
    assert [fit["name"] for fit in view["fits"]] == fits
    assert {value["name"]: value["text"] for value in view["values"]} == values


def test_a_picture(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")
    status, out, err = run(capsys, "watch", path, "--once")
    assert (status, err) == (0, "") and "no writer" in out and "\x1b" not in out
    for text in ("fits/fall", "3/10", "128", "█▃▁", "closed", "losses", "<script>alert('1')</script>&\"[red]\\x1b[31m"):
        assert text in out
    status, out, _ = run(capsys, "top", path.parent, "--once")
    assert status == 0 and "run.pm" in out and "fits/fall 3/10 closed" in out


class Deep(Falling):
    """Falls from a height with many digits."""

    max_iter = 300

    def start(self) -> None:
        self.state.height = 8 * 2.252448e10


@pytest.mark.parametrize("columns", [100, 80, 50, 0])  # 0: unknown
def test_a_narrow_terminal_shows_fewer_columns_and_whole_numbers(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(InterruptedError):
        Deep(3).run(path, "fits/deep")
    out = run(capsys, "watch", path, "fits", "--once")[1]
    assert "2.252448e+10" in out and "3/300" in out and "fits/deep" in out and "closed" in out
    assert ("curve" in out) == (columns != 50)


@pytest.mark.parametrize("columns", [28, 1])
def test_a_terminal_that_is_too_narrow_marks_what_it_cuts(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(InterruptedError):
        Deep(3).run(path, "fits/deep")
    for command in (("top", path.parent), ("watch", path, "fits")):
        status, out, err = run(capsys, *command, "--once")
        assert (status, err) == (0, "") and all(len(line) <= columns for line in out.splitlines())
    assert columns == 1 or re.search(r"2\.252\d*…", out)


def test_a_terminal_that_only_prints(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    for command in (("watch", path), ("top", path.parent)):
        status, out, err = run(capsys, *command)
        assert (status, out) == (2, "") and "TERM=dumb" in err and "--json" in err
        assert run(capsys, *command, "--once")[0] == 0


def test_lines_end_with_their_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is no news that could not be written."""
    reading, writing = os.pipe()

    def views(follower: Follower, stopped: threading.Event) -> Iterator[follow.View]:
        for number in range(3):
            assert number < 2, "it goes on looking"
            yield follower.view()
            if not number:
                assert json.loads(os.read(reading, 1 << 20))["path"] == str(path)
                os.close(reading)

    monkeypatch.setattr("pmstore._watch.command.views", views)
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert _cli.main(["watch", "--json", str(path)]) == 128 + signal.SIGPIPE


def test_errors(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run(capsys, "watch", path, "nothing", "--once")
    assert (status, out) == (2, "") and "'fits/fall'" in err and "'epoch'" in err and "fall/progress" not in err
    assert run(capsys, "watch", path.with_name("none.pm"), "--once")[0] == 2
    assert "is no terminal" in run(capsys, "watch", path)[2] and "is no terminal" in run(capsys, "top", path.parent)[2]
    assert "--web serves a page" in run(capsys, "watch", path, "--web", "--once")[2]
    with pytest.raises(SystemExit):
        run(capsys, "watch", path, "--port", "65536")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for command in ("watch", "top"):
        status, _, err = run(capsys, command, path if command == "watch" else path.parent, "--once")
        assert status == 2 and "pip install 'pmstore[watch]', or use --json" in err


def test_an_interrupt_is_the_end(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    status, out, err = run(capsys, "watch", path, "--json")
    assert (status, err) == (0, "") and len(out.splitlines()) == 1


@pytest.mark.parametrize("names", [("late",), ("lost",), ("late", "lost")])
def test_figures_with_the_names_of_counts(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")

    class Other(Falling):
        def step(self) -> dict[str, float]:
            return super().step() | dict.fromkeys(names, 0.25)

    Other().run(path, "other")
    told(capsys, "watch", path)
    assert "finished" in run(capsys, "watch", path, "other", "--once")[1]


def test_a_damaged_fit_does_not_hide_the_others(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(path) as store:
        Falling().run(store, "second")
        store["second/history/limits"] = "none"
    assert [fit["state"] for fit in told(capsys, "watch", path)["fits"]] == ["closed", "unreadable"]


def test_it_follows_commits_and_a_store_that_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "EVERY", 0.0)
    with pmstore.open(path) as store, Follower(path, ["epoch"]) as follower:
        seen = views(follower, threading.Event())
        first = next(seen)
        for epoch in (8, 9):
            store["epoch"] = epoch
            store.commit()
            view = next(view for view in seen if view.sequence > first.sequence)
            assert view.values[0].text == str(epoch) and view.age < 60
            first = view
        store.close()
        assert next(view for view in seen if view.writer == "closed").values[0].text == "9"
        path.unlink()
        assert next(view for view in seen if view.writer == "missing").values[0].text == "9"
        with pmstore.open(path, "w") as store:
            store["epoch"] = "new"
        assert next(view for view in seen if view.values and view.values[0].text == "'new'").sequence == 1


@pytest.mark.parametrize("gone", [False, True])
def test_a_store_that_is_replaced_during_a_look(path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """gone: and deleted before the new one is opened."""
    writer, opened, replaced = Follower.writer, follow.open_store, []

    def replace(follower: Follower) -> str:
        found = writer(follower)
        if not replaced:
            replaced.append(path)
            path.unlink()
            with pmstore.open(path) as store:
                store["epoch"] = "new"
        return found

    def open_store(place: Any, mode: Any) -> pmstore.Store:
        if gone:
            path.unlink(missing_ok=True)
        return opened(place, mode)

    with Follower(path, ["epoch"]) as follower:
        assert follower.view().values[0].text == "7"
        monkeypatch.setattr(Follower, "writer", replace)
        monkeypatch.setattr(follow, "open_store", open_store)
        view = follower.view()
    assert [value.text for value in view.values] == (["7"] if gone else ["'new'"])


def test_many_fits_and_values(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST", 1)
    with pmstore.open(path) as store:
        Falling().run(store, "a finished one")
    with Follower(path) as follower:
        view = follower.view()
    assert [fit.name for fit in view.fits] == ["fits/fall"] and len(view.values) == 1 and view.more == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 100, "'" + "x" * 58 + "…"),
        (10**60, "1" + "0" * 58 + "…"),
        (None, "None"),
        (np.float32(0.5), "0.5"),
        ({"a": "\x07"}, "{'a': '\\x07'}"),
        ("x" * 5000, "str"),
    ],
)
def test_values(path: Path, value: Any, text: str) -> None:
    with pmstore.open(path) as store:
        store["value"] = value
        store.create_list("big").extend([1, "text", 10**400, 2.5])
    with Follower(path, ["value", "big"]) as follower:
        big, shown = follower.view().values
    assert shown.text == text and big.curve == ([0, 1, 2, 3], [1.0, None, None, 2.5])


def test_top(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path.parent / "notes.txt").write_text("no store")
    (path.parent / ".hidden").write_bytes(path.read_bytes())
    (path.parent / "cut.pm").write_bytes(path.read_bytes()[:5000])
    with pmstore.open(path.parent / "written.pm") as store:
        store["epoch"] = 1
        store.commit()
        view = told(capsys, "top", path.parent)
    cut, one, written = view["stores"]
    assert (cut["name"], cut["size"], cut["sequence"]) == ("cut.pm", 5000, None) and cut["problem"]
    assert (one["name"], one["size"], one["writer"], one["problem"]) == ("run.pm", path.stat().st_size, "closed", "")
    [fit] = one["fits"]
    assert (fit["name"], fit["iteration"], fit["starts"]) == ("fits/fall", 3, 1)
    assert (written["name"], written["sequence"], written["writer"]) == ("written.pm", 1, "alive")
    assert run(capsys, "top", path.parent / "none", "--once", "--json")[0] == 2
    assert run(capsys, "top", "", "--once") == (2, "", "pmstore: not a path: ''\n")
    assert "is not on this machine" in run(capsys, "top", "s3://bucket/runs", "--once")[2]


def test_top_tells_of_fits_that_it_leaves_out(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(follow, "MOST", 1)
    monkeypatch.setenv("COLUMNS", "160")
    with pmstore.open(path) as store:
        Falling().run(store, "another")
        Falling().run(store, "a third")
    assert told(capsys, "top", path.parent)["stores"][0]["more"] == 2
    assert "fits/fall 3/10 closed, and 2 more" in run(capsys, "top", path.parent, "--once")[1]


def test_the_time_between_two_starts_is_no_pause(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with pmstore.open(path) as store, Follower(path) as follower:

        def state(done: int) -> str:
            with contextlib.suppress(InterruptedError):
                Falling(done).run(store, "again")
            return next(fit.state for fit in follower.view(lambda: now[0]).fits if fit.name == "again")

        assert state(3) == "running"
        now[0] += 3600
        assert state(5) == "running"
        now[0] += 100
        view = follower.view(lambda: now[0])
        assert next(fit.state for fit in view.fits if fit.name == "again") == "stalled"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_the_terminal_with_its_cursor(number: int) -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), force_terminal=True)
    before = signal.getsignal(number)

    def pictures() -> Iterator[str]:
        yield "first"
        os.kill(os.getpid(), number)
        yield "second"

    with pytest.raises(SystemExit) as ended:
        terminal.live(console, pictures())
    out = console.file.getvalue()
    assert ended.value.code == 128 + number and signal.getsignal(number) == before
    assert "first" in out and "second" not in out and out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


def test_ints_that_python_makes_no_text_of(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pmstore.open(path) as store:
        store["huge"] = 10**5000
        store["inside"] = [10**5000]
        store["fraction"] = Fraction(1, 10**5000)
    values = {value["name"]: value["text"] for value in told(capsys, "watch", path)["values"]}
    assert values["huge"].startswith("0x") and values["inside"] == "list with an int of too many digits"
    assert [one["problem"] for one in told(capsys, "top", path.parent)["stores"]] == [""]
    assert run(capsys, "dump", path, "huge") == (0, f"{10**5000:#x}\n", "")
    dumped = json.loads(run(capsys, "dump", path, "--json")[1])
    assert int(dumped["huge"]["int"], 16) == 10**5000 and dumped["inside"] == [dumped["huge"]]
    assert dumped["fraction"] == [1, dumped["huge"]]


def test_what_is_wrong_with_one_file_does_not_hide_the_others(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.with_name("itself.pm").symlink_to("itself.pm")
    path.with_name("copy.pm").write_bytes(path.read_bytes())
    view = Follower.view

    def fails(self: Follower, now: Any) -> follow.View:
        if self.path.endswith("copy.pm"):
            raise RuntimeError("a mistake")
        return view(self, now)

    monkeypatch.setattr(Follower, "view", fails)
    stores = told(capsys, "top", path.parent)["stores"]
    assert [(one["name"], one["problem"]) for one in stores] == [("copy.pm", "a mistake"), ("run.pm", "")]


TOP_OF_ANOTHER_USER = """
import os, sys
from pmstore import _cli
if not os.geteuid():
    os.setuid(65534)
sys.exit(_cli.main(["top", sys.argv[1], "--once", "--json"]))
"""


def test_a_store_that_may_not_be_read_is_shown_with_the_reason(path: Path, child: Callable[..., Child]) -> None:
    let_others_enter(path)
    path.chmod(0o444)
    for name in ("closed.pm", "secret.txt"):
        path.with_name(name).write_bytes(path.read_bytes())
        path.with_name(name).chmod(0)
    closed, run = json.loads(child(TOP_OF_ANOTHER_USER, path.parent).end())["stores"]
    assert (closed["name"], closed["size"]) == ("closed.pm", path.stat().st_size)
    assert "Permission denied" in closed["problem"] and (run["name"], run["problem"]) == ("run.pm", "")


@pytest.mark.parametrize("how", ["url", "home"])
def test_paths_as_open_takes_them(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    there = f"file://{path.parent}" if how == "url" else "~"
    for command in ("info", "ls", "check", "dump", "upgrade", "compact"):
        status, _, err = run(capsys, command, f"{there}/run.pm")
        assert (status, err) == (0, ""), command
    assert told(capsys, "watch", f"{there}/run.pm")["path"] == f"{there}/run.pm"
    monkeypatch.chdir(path.parent)
    assert told(capsys, "watch", "run.pm")["path"] == "run.pm", "the path is shown as it was given"
    assert run(capsys, "backup", path, f"{there}/backup.pm")[::2] == (0, "") and path.with_name("backup.pm").exists()
