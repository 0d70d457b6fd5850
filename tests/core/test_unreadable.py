"""Blocks that the disk can't read, and files that somebody cut short: an error with the place, and no signal."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from tests.golden.files import bytes_of
from tests.support import shim
from tests.support.bad_disk import BadDisk
from tests.support.places import entry_of

PAGE = 4096
REGION = 2 * PAGE

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[BadDisk]:
    try:
        disk = BadDisk(tmp_path)
    except OSError as error:
        pytest.skip(f"no file system of our own: {error}")
    try:
        yield disk
    finally:
        disk.close()


def in_child(function: Callable[[], Any]) -> None:
    """Calls it in a forked process, as a signal would end this one."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of fork beside threads
        child = os.fork()
    if not child:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[:60_000])
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    assert not status, said


def page_of(store: pmstore.Store, name: str, at: int = 0) -> int:
    """The page of the file that holds this byte of what is stored under a name."""
    entry = entry_of(store, name)
    assert entry.offset
    return (REGION + entry.offset + at) // PAGE


def refused(function: Callable[[], Any], *says: str) -> str:
    """The text of the StoreIOError."""
    with pytest.raises(pmstore.StoreIOError) as caught:
        function()
    assert type(caught.value) is pmstore.StoreIOError and caught.value.errno == errno.EIO
    text = str(caught.value)
    assert all(one in text for one in says), text
    return text


LARGE, MIDDLE = 1 << 20, 100_000  # bytes of arrays


def make(path: Path) -> dict[str, int]:
    """A store with one of each, closed. Where its parts lie, in pages of the file."""
    with pmstore.open(path, "x", media="file") as store:
        store["large"] = np.arange(LARGE // 8, dtype="f8")
        store["other"] = np.arange(LARGE // 8, dtype="f8")
        store["middle"] = np.arange(MIDDLE // 8, dtype="f8")
        store["blob"] = b"0123456789" * 1000
        store["wide"] = np.zeros(3, dtype=[(f"a rather long name of a field {i}", "f8") for i in range(60)])
        store["n"] = 1
        store.commit()
        wide = store._catalog.core.get(b"nwide")
        assert wide is not None
        return {
            "large": page_of(store, "large", 5 * PAGE),
            "table": page_of(store, "large", LARGE),
            "middle": page_of(store, "middle", 3 * PAGE),
            "blob": page_of(store, "blob", PAGE),
            "wide": page_of(store, "wide", wide.length - 1),
            "header A": 0,
            "header B": 1,
            "root": 2,
            "map list": 3,
            "map": 4,
            "catalog": 5,
        }


def spoiled(disk: BadDisk, *parts: str) -> Path:
    pages = make(disk.behind / "store.pm")
    disk.spoil("store.pm", *(pages[part] for part in parts))
    return disk.mount / "store.pm"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_values_on_bad_blocks_are_errors_and_the_rest_can_be_used(disk: BadDisk, mode: Any) -> None:
    path = spoiled(disk, "blob", "wide", "large")

    def use() -> None:
        store = pmstore.open(path, mode, media="file", exclusive=True)
        refused(lambda: store["blob"], "'blob'", "offset", "Input/output error")
        refused(lambda: store["wide"], "'wide'", "offset")
        assert store["n"] == 1 and store["other"][-1] == LARGE // 8 - 1
        assert store["large"][0] == 0  # of a live array only the bad block is a signal
        assert len(store) == 6 and {row[0]: row[5] for row in store._rows()}["wide"] == "unreadable"
        if mode == "r+":
            store["large"][-1] = 7
            store["n"] = 2
            store.commit()
            assert (store["n"], store["large"][-1]) == (2, 7)
        store.close() if mode == "r" else os._exit(0)

    in_child(use)


def test_a_part_of_an_array_that_begins_in_a_bad_block(disk: BadDisk) -> None:
    path = spoiled(disk, "large")
    first = 5 * PAGE // 8  # element of the bad block
    with pmstore.open(path, "r") as store:
        for part in (np.s_[first + 1 : first + 9], np.s_[first + 1 : 7 * PAGE // 8], np.s_[first - 9 : first + 1]):
            refused(lambda part=part: store.read(("large", part)), "cannot read contents")  # type: ignore[misc]
        np.testing.assert_array_equal(store.read(("large", np.s_[:first])), np.arange(float(first)))


@pytest.mark.parametrize("bad", [3, 200])  # a row, a spare row
def test_an_array_that_grows_is_not_read_or_written_on_a_bad_block(disk: BadDisk, bad: int) -> None:
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        store.create_array("x", (150, 512), maxshape=(300, 512))
        store.create_array("y", (150, 512), maxshape=(10**9, 512))
        pages = [page_of(store, "x", bad * PAGE), *([page_of(store, "y", bad * PAGE)] if bad < 150 else [])]
    disk.spoil("store.pm", *pages)

    def use() -> None:
        store = pmstore.open(disk.mount / "store.pm", "r+", media="file")
        if bad == 3:
            refused(lambda: store.append("y", np.ones(512)), "'y'", "offset")  # moves all rows
            assert len(store["y"]) == 150 and len(store.append("x", np.ones((40, 512)))) == 190
        else:
            refused(lambda: store.append("x", np.ones((60, 512))), "'x'", "offset")
            refused(lambda: store.resize("x", 300), "'x'", "offset")
            assert len(store.append("x", np.ones((40, 512)))) == 190
        store.commit()
        assert store["x"][189, 511] == 1
        os._exit(0)

    in_child(use)


def test_an_array_whose_hashes_are_on_a_bad_block_can_be_deleted(disk: BadDisk) -> None:
    path = spoiled(disk, "table")

    def use() -> None:
        store = pmstore.open(path, "r+", media="file")
        del store["large"], store["other"]
        store.commit()
        assert set(store) == {"middle", "blob", "wide", "n"}
        assert not store.check().ok, "its space is lost"
        os._exit(0)

    in_child(use)


def test_check_goes_on_after_what_the_disk_can_not_read(disk: BadDisk) -> None:
    path = spoiled(disk, "large", "blob", "middle", "header B")

    def use() -> None:
        store = pmstore.open(path, "r", media="file", exclusive=True)
        report = store.check()
        assert {problem.name for problem in report} == {"large", "middle", "blob", None}
        for name, block in {"large": 5, "middle": 3}.items():
            (problem,) = (problem for problem in report if problem.name == name)
            entry = entry_of(store, name)
            assert (problem.offset, problem.length, problem.block) == (entry.offset, entry.length, block)
            assert problem.rows == range(block * PAGE // 8, (block + 1) * PAGE // 8)
        (header,) = (problem for problem in report if problem.name is None)
        assert (header.offset, header.length, header.block) == (0, 0, None), "no part of the region"
        assert all("cannot read" in problem.text and "offset" in problem.text for problem in report)
        assert all(key or not block for _, _, block, key, _ in store._catalog.core.check())
        store.close()
        with pytest.raises(pmstore.CorruptStoreError, match="cannot read contents"):
            pmstore.open(path, "r", media="file", verify=True, exclusive=True)

    in_child(use)


def test_check_reads_no_part_of_a_large_array_without_asking(disk: BadDisk) -> None:
    """It asks for a megabyte at a time."""
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        store["array"] = np.zeros(3 * LARGE // 8)
        store.commit()
        bad = page_of(store, "array", 300 * PAGE)
    disk.spoil("store.pm", bad)

    def use() -> None:
        with pmstore.open(disk.mount / "store.pm", "r", media="file", exclusive=True) as store:
            (problem,) = store.check()
            assert problem.block == 300 and "cannot read" in problem.text

    in_child(use)


@pytest.mark.parametrize("number, at", [(9, 0), (101 * PAGE // 8 - 100, 101 * PAGE)], ids=["slab", "last hash"])
def test_check_reads_neither_slab_nor_hash_without_asking(disk: BadDisk, number: int, at: int) -> None:
    """The last of the larger array's 101 hashes is on a page of its own."""
    with pmstore.open(disk.behind / "store.pm", "x", media="file") as store:
        store["array"] = np.arange(float(number))
        store.commit()
        bad = page_of(store, "array", at)
    disk.spoil("store.pm", bad)

    def use() -> None:
        with pmstore.open(disk.mount / "store.pm", "r", media="file", exclusive=True) as store:
            (problem,) = store.check()
            assert problem.name == "array" and "cannot read" in problem.text

    in_child(use)


@pytest.mark.parametrize("part", ["root", "map list", "map", "catalog"])
def test_metadata_on_a_bad_block(disk: BadDisk, part: str) -> None:
    path = spoiled(disk, part)

    def use() -> None:
        for mode in ("r", "r+"):
            try:
                store = pmstore.open(path, mode, media="file", exclusive=True)  # type: ignore[call-overload]
            except pmstore.StoreIOError as error:
                assert part == "root" and "a page of metadata" in str(error) and str(path) in str(error)
                continue
            refused(lambda: store["n"], "a page of metadata", "offset")  # noqa: B023
            refused(lambda: list(store), "a page of metadata")  # noqa: B023
            assert any("cannot read" in problem.text for problem in store.check())
            assert not any(block for _, _, block, _, _ in store._catalog.core.check())
            if mode == "r+":
                refused(lambda: store.__setitem__("fresh", 1), "a page of metadata")  # noqa: B023
            store.close()

    in_child(use)


def test_a_header_copy_that_can_not_be_read_is_mended_from_the_other(disk: BadDisk) -> None:
    for part in ("header A", "header B"):
        pages = make(disk.behind / part)
        disk.spoil(part, pages[part])

    def use() -> None:
        for part in ("header A", "header B"):
            with pmstore.open(disk.mount / part, "r", media="file", exclusive=True) as store:
                assert store["n"] == 1 and "header" in str(store.check())
            with pmstore.open(disk.mount / part, "r+", media="file") as store:
                assert store["n"] == 1 and store.check().ok
                store["n"] = 2
            assert not (disk.behind / f"{part}.bad").read_text()

    in_child(use)
    make(disk.behind / "both")
    disk.spoil("both", 0, 1)
    for exclusive in (False, True):

        def look(how: bool = exclusive) -> None:
            refused(lambda: pmstore.open(disk.mount / "both", "r", exclusive=how), "cannot read the header")

        in_child(look)


def test_a_header_copy_of_format_0_that_can_not_be_read(disk: BadDisk) -> None:
    """It is mended as one of format 1, beside the other one."""
    for part in (0, 1):
        (disk.behind / str(part)).write_bytes(bytes_of("format0/file-compacted"))
        disk.spoil(str(part), part)

    def use() -> None:
        for part in (0, 1):
            for mode, version in (("r", 0), ("r+", 1), ("r+", 1)):
                with pmstore.open(disk.mount / str(part), mode, media="file", exclusive=mode == "r") as store:  # type: ignore[arg-type]
                    assert len(store) == 400 and store.check().ok == (mode == "r+")
                data = (disk.behind / str(part)).read_bytes()
                assert [data[8], data[4096 + 8]] == [version, version]

    in_child(use)


@pytest.mark.long
def test_a_header_copy_that_can_not_be_read_beside_one_that_is_damaged(disk: BadDisk) -> None:
    """It may be a store's: the file is not said to be none, or to be damaged."""
    for name, at in (("magic", 0), ("fields", 50)):
        make(disk.behind / name)
        with open(disk.behind / name, "r+b") as file:
            file.seek(at)
            file.write(b"12345678")
        disk.spoil(name, 1)
        for exclusive in (False, True):

            def look(name: str = name, how: bool = exclusive) -> None:
                refused(lambda: pmstore.open(disk.mount / name, "r", exclusive=how), "cannot read the header")

            in_child(look)


def crashed(path: Path) -> dict[str, int]:
    """A store as a crash left it: three commits in the log, of which the last declares an array. Pages of the file."""
    with pmstore.open(path, "x", media="file") as store:
        store["a"] = np.zeros(1000)
        store.commit()
        store.close()
    store = pmstore.open(path, "r+", media="file")
    for i in range(3):
        store["a"][:] = i
        if i == 2:
            store["declared"] = np.ones(1000)
        store.commit()
    pages = {"declared": page_of(store, "declared"), "a": page_of(store, "a")}
    size, log = os.path.getsize(path), store.stats().log_size
    shutil.copy(path, path.with_suffix(".copy"))
    store.close()
    shutil.move(path.with_suffix(".copy"), path)
    return pages | {"record": (size - log) // PAGE, "body": (size - log) // PAGE + 4, "behind": size // PAGE - 1}


@pytest.mark.parametrize("mode", ["r", "r exclusive", "r+"])
@pytest.mark.parametrize("part", ["record", "body", "behind", "declared"])
def test_recovery_gives_up_nothing_for_a_bad_block(disk: BadDisk, part: str, mode: Any) -> None:
    """A record may stand there that was acknowledged: neither a signal, nor the commit before it."""
    mode, _, alone = mode.partition(" ")
    pages = crashed(disk.behind / "store.pm")
    disk.spoil("store.pm", pages[part])
    path = disk.mount / "store.pm"
    what = "the log" if part != "declared" else "contents" if alone or mode == "r+" else "what a commit declares"

    def use() -> None:
        for _ in range(2):
            text = refused(lambda: pmstore.open(path, mode, media="file", exclusive=bool(alone)), str(path), what)
            assert f"offset {pages[part] * PAGE} " in text

    in_child(use)


@pytest.mark.parametrize("copy", [0, 1])
def test_a_header_copy_is_mended_even_if_the_log_can_not_be_read(disk: BadDisk, copy: int) -> None:
    disk.spoil("s", copy, crashed(disk.behind / "s")["body"])
    in_child(lambda: refused(lambda: pmstore.open(disk.mount / "s", "r+", media="file"), "the log"))
    shutil.copy(disk.behind / "s", disk.behind / "t")
    disk.spoil("t", 1 - copy)
    in_child(lambda: pmstore.open(disk.mount / "t", "r", media="file", exclusive=True).close())


def test_an_image_that_the_log_covers_is_written_anew(disk: BadDisk) -> None:
    """A page that a crash left half written must only be readable for a process that may not write it."""
    pages = crashed(disk.behind / "store.pm")
    disk.spoil("store.pm", pages["a"])
    path = disk.mount / "store.pm"

    def use() -> None:
        refused(lambda: pmstore.open(path, "r", media="file", exclusive=True), "offset")
        with pmstore.open(path, "r+", media="file") as store:
            assert (store["a"] == 2).all() and store.check().ok

    in_child(use)


def test_what_a_commit_compares_by_itself_is_read_before(disk: BadDisk) -> None:
    """An array of a few pages is compared whole, touched or not; of a larger one, what was written, and its hashes."""
    path = spoiled(disk, "middle", "table")

    def use() -> None:
        with pmstore.open(path, "r", media="file", exclusive=True) as store:
            assert store["middle"][0] == 0  # a process that can't write commits nothing
        with pmstore.open(path, "r+", media="file") as store:
            refused(lambda: store["middle"], "'middle'", "contents")
            store["middle"] = np.ones(MIDDLE // 8)  # another place
            store["n"] = 2
            store.commit()
            large = store["large"]
            store.commit()
            large[0] = -1.0
            refused(store.commit, "the hashes of contents")
            refused(lambda: store.release("large"), "contents")
            store.rollback()
            assert large[0] == 0 and store["n"] == 2 and (store["middle"] == 1).all()
            del large, store["large"]
            store["n"] = 3
            store.commit()
            os._exit(store["n"] != 3)

    in_child(use)


def test_the_trackers_test_touches_no_bad_block(disk: BadDisk) -> None:
    """It maps the first pages of the region, which may be catalog pages that nobody has asked for."""
    behind = disk.behind / "store.pm"
    with pmstore.open(behind, "x", media="file") as store:
        for i in range(200):
            store[f"many/{i:03}"] = "x" * 300
        store["z"] = np.zeros(LARGE // 8)
        catalog = 5  # of the first names
    disk.spoil("store.pm", catalog)

    def use() -> None:
        with pmstore.open(disk.mount / "store.pm", "r+", media="file") as store:
            refused(lambda: store["many/000"])
            z = store["z"]
            z[0] = -1.0
            store.commit()
            assert store.stats().tracker == "compare" and z[0] == -1

    in_child(use)


def free_pages(path: Path) -> list[int]:
    """Pages of the file that nothing of `make` uses."""
    with pmstore.open(path, "r", media="file", exclusive=True) as store:
        free = list(range(2 + 5, 2 + store.stats().region_size // PAGE))
        for name in store:
            entry = entry_of(store, name)
            first = (REGION + entry.offset) // PAGE
            used = set(range(first, 1 + (REGION + entry.offset + entry.length + entry.length // 512 + 16) // PAGE))
            free = [page for page in free if not entry.offset or page not in used]
    return free


def test_free_space_on_a_bad_block_is_written_before_it_is_used(disk: BadDisk) -> None:
    make(disk.behind / "store.pm")
    disk.spoil("store.pm", *free_pages(disk.behind / "store.pm"))
    path = disk.mount / "store.pm"

    def use() -> None:
        with pmstore.open(path, "r+", media="file") as store:
            for i in range(100):
                store[f"names/{i}"] = "x" * 100
                store[f"small/{i}"] = np.arange(20)
            store.commit()
            assert store.check().ok and store["small/99"][-1] == 19

    in_child(use)


def test_free_space_that_can_not_be_written_either_is_an_error(disk: BadDisk) -> None:
    make(disk.behind / "store.pm")
    disk.wear_out("store.pm", *free_pages(disk.behind / "store.pm"))
    path = disk.mount / "store.pm"

    def use() -> None:
        with pmstore.open(path, "r+", media="file") as store:
            refused(lambda: store.update(small=np.arange(20)))
            refused(lambda: store.update({f"names/{i}": "x" * 100 for i in range(100)}))
            store.rollback()
            assert len(store) == 6 and store.check().ok

    in_child(use)


def test_the_command_line_names_what_can_not_be_read(disk: BadDisk, capfd: pytest.CaptureFixture[str]) -> None:
    path = spoiled(disk, "blob", "large")

    def use() -> None:
        assert _cli.main(["ls", "-l", str(path)]) == 0
        assert _cli.main(["info", str(path)]) == 0
        assert _cli.main(["check", str(path)]) == 1
        assert _cli.main(["dump", str(path), "large"]) == 1
        assert _cli.main(["dump", str(path), "n", "other"]) == 0
        assert _cli.main(["dump", str(path)]) == 1

    in_child(use)
    out, err = capfd.readouterr()
    assert "'blob': cannot read" in out and "'large': cannot read" in out
    assert "n = 1" in out and "'blob'" in err and "'large'" in err


def cut(path: Path, at: int) -> Callable[[], None]:
    """Somebody else cuts a file short while it is open: no file system of our own is needed for that."""

    def use() -> None:
        store = pmstore.open(path, "r", media="file", exclusive=True)
        assert store["n"] == 1
        os.truncate(path, at)
        refused(lambda: store["blob"], "'blob'", "cut short")
        assert {problem.name for problem in store.check()} >= {"blob", "large"}
        assert store["n"] == 1

    return use


def test_a_file_cut_short_while_it_is_open(tmp_path: Path) -> None:
    pages = make(tmp_path / "store.pm")
    in_child(cut(tmp_path / "store.pm", pages["large"] * PAGE))


def by_an_older_kernel(directory: str) -> None:
    """Run in a child with the shim: madvise knows nothing of reading beforehand, and pread does it."""
    path = Path(directory) / "store.pm"
    pages = make(path)
    shim.variable("fault_populate").value = errno.EINVAL
    in_child(cut(path, pages["large"] * PAGE))
    assert shim.variable("fault_hits", shim.ctypes.c_long).value == 0


@pytest.mark.no_sanitizer  # which is preloaded too
def test_an_older_kernel(tmp_path: Path, fault_library: Path) -> None:
    shim.call(fault_library, by_an_older_kernel, tmp_path)


def test_I20_a_reader_needs_no_contents_that_recovery_does_not_verify(disk: BadDisk) -> None:
    """Those of an older commit in the log of a process that was killed. Those of the newest one are needed."""
    for name in ("older", "newest"):
        store = pmstore.open(disk.behind / f"{name}.pm", "x", media="file")
        store["v"] = 1
        store.commit()
        store["x"] = np.arange(100_000.0)
        store.commit()
        if name == "older":
            store["v"] = 2
            store.commit()
        disk.spoil(f"{name}.pm", page_of(store, "x", 5 * PAGE))
        store._drop(discard=True)

    def read() -> None:
        with pmstore.open(disk.mount / "older.pm", "r", media="file") as store:
            assert store["v"] == 2 and store.read(("x", np.s_[10:20]))[0] == 10
            refused(lambda: store["x"], "'x'", "offset")
        refused(lambda: pmstore.open(disk.mount / "newest.pm", "r", media="file"), "what a commit declares")

    in_child(read)


@pytest.mark.parametrize("pages", [(0,), (1,), (0, 1)], ids=str)
def test_D28_the_format_of_a_file_with_a_header_that_can_not_be_read(disk: BadDisk, pages: tuple[int, ...]) -> None:
    """One copy is enough to upgrade the file; without it, the error is one of pmstore's."""
    (disk.behind / "store.pm").write_bytes(bytes_of("format0/file-compacted"))
    disk.spoil("store.pm", *pages)
    path = disk.mount / "store.pm"

    def use() -> None:
        if len(pages) == 2:
            refused(lambda: pmstore.upgrade(path), "header")
            refused(lambda: pmstore.compact(path), "header")
            return
        assert _cli.main(["info", str(path)]) == 0
        with pytest.raises(pmstore.CorruptStoreError, match="header"):
            pmstore.compact(path)
        assert pmstore.upgrade(path) == 0 and pmstore.upgrade(path) == 1
        with pmstore.open(path, "r") as store:
            assert store.check().ok and len(store) == 400

    in_child(use)


def test_I36_spare_rows_that_can_not_be_read_cost_no_rows(disk: BadDisk) -> None:
    """Salvage and copy need the rows that the entry counts, and their hashes."""
    path, content = disk.behind / "grown.pm", np.arange(5000.0).reshape(1000, 5)
    with pmstore.open(path, media="file") as store:
        store.create_array("x", data=content, maxshape=(None, 5))
        store.append("x", content[:1])
        bad = page_of(store, "x", 12 * PAGE)
    disk.spoil("grown.pm", bad)

    def rescue() -> None:
        assert "all of its rows are copied" in str(
            pmstore.salvage(disk.mount / "grown.pm", disk.behind / "salvaged.pm")
        )
        with pmstore.open(disk.behind / "salvaged.pm", "r") as store:
            assert np.array_equal(store["x"][:1000], content) and len(store["x"]) == 1001

    def copy() -> None:
        with pmstore.open(disk.mount / "grown.pm", media="file") as store:
            store.copy("x", "y")
            assert np.array_equal(store["y"][:1000], content)

    in_child(rescue)
    in_child(copy)
