"""The model of a disk for files, by litmus runs: each lists the exact states that a crash may leave."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pmstore.testing._files.explore import Options, Search
from pmstore.testing._files.model import Model
from pmstore.testing._files.recording import ROOT, Event, Inode, Recording

FILE, SECOND = 2, 3
OLD, NEW, NEXT = b"o" * 512, b"n" * 512, b"x" * 512


def run(events: Sequence[Event], before: bytes | None = None, made: Sequence[int] = ()) -> Recording:
    """A recording: of the file f with these contents, or of an empty directory."""
    entries = {} if before is None else {"f": FILE}
    inodes = {ROOT: Inode("directory", 0o755, b"", entries)}
    if before is not None:
        inodes[FILE] = Inode("file", 0o644, before, {})
    inodes |= {number: Inode("file", 0o644, b"", {}) for number in made}
    return Recording(["litmus"], inodes, list(events), frozenset())


def left(recording: Recording, point: int | None = None, filesystem: str = "posix", sector: int = 512) -> set[str]:
    """What a crash at a point (the end) may leave: "f=oonn", by the first letter of each 512 bytes, "." for zeros."""
    model = Model(recording, filesystem, sector)
    at = model.points - 1 if point is None else point
    found = set()
    for lost in model.states(at):
        image = model.image(at, lost)
        texts = []
        for name, file in image.items():
            letters = [chr(file.content[n] or ord(".")) for n in range(0, len(file.content), 512)]
            texts.append(f"{name}={''.join(letters)}")
        found.add(" ".join(texts))
    return found


def write(data: bytes, offset: int = 0, inode: int = FILE) -> Event:
    return Event("write", inode, offset, len(data), data, path="f")


def sync(how: str = "file", inode: int = FILE, offset: int = 0, length: int = -1) -> Event:
    return Event("sync", inode, offset, length, how=how)


def create(name: str = "f", inode: int = FILE) -> Event:
    return Event("create", inode, folder=ROOT, name=name, path=name)


def rename(old: str, new: str, inode: int, other: int = 0) -> Event:
    return Event("rename", inode, folder=ROOT, name=old, folder2=ROOT, name2=new, other=other, path=old)


BOTH = pytest.mark.parametrize("filesystem", ["posix", "ext4"])


@BOTH
def test_a_write_may_be_lost(filesystem: str) -> None:
    recording = run([write(NEW)], OLD)
    assert left(recording, 0, filesystem) == {"f=o"}
    assert left(recording, None, filesystem) == {"f=o", "f=n"}


@BOTH
def test_a_synced_write_may_not(filesystem: str) -> None:
    for how in ("file", "data", "range", "all"):
        assert left(run([write(NEW), sync(how)], OLD), None, filesystem) == {"f=n"}


@BOTH
def test_a_sector_keeps_a_prefix_of_its_writes(filesystem: str) -> None:
    assert left(run([write(NEW), write(NEXT)], OLD), None, filesystem) == {"f=o", "f=n", "f=x"}
    assert left(run([write(NEW), sync(), write(NEXT)], OLD), None, filesystem) == {"f=n", "f=x"}


@BOTH
def test_two_sectors_are_independent(filesystem: str) -> None:
    recording = run([write(NEW + NEW)], OLD + OLD)
    assert left(recording, None, filesystem) == {"f=oo", "f=on", "f=no", "f=nn"}
    assert left(recording, None, filesystem, sector=4096) == {"f=oo", "f=nn"}


@BOTH
def test_two_writes_may_change_places(filesystem: str) -> None:
    recording = run([write(NEW), write(NEXT, 512)], OLD + OLD)
    assert left(recording, None, filesystem) == {"f=oo", "f=no", "f=ox", "f=nx"}
    ordered = run([write(NEW), sync(), write(NEXT, 512)], OLD + OLD)
    assert left(ordered, None, filesystem) == {"f=no", "f=nx"}


def test_a_file_grows_with_and_without_its_data() -> None:
    recording = run([write(NEW, 512)], OLD)
    assert left(recording) == {"f=o", "f=o.", "f=on"}
    assert left(recording, None, "ext4") == {"f=o", "f=on"}


def test_a_long_write_grows_a_file_in_steps() -> None:
    recording = run([write(b"n" * 10000)], b"")
    sizes = {len(state) - 2 for state in left(recording, None, "posix", 4096)}
    assert sizes == {0, 8, 16, 20}


def test_space_never_written_may_hold_anything() -> None:
    recording = run([write(NEW, 512)], OLD)
    images = set()
    model = Model(recording, stale=7)
    for lost in model.states(1):
        images.add(model.image(1, lost)["f"].content)
    (stale,) = images - {OLD, OLD + NEW}
    assert stale[:512] == OLD and len(stale) == 1024 and len(set(stale[512:])) > 100


def test_a_truncation_may_be_lost_and_leaves_zeros() -> None:
    recording = run([Event("size", FILE, length=0), write(NEW, 512)], OLD + OLD)
    # Truncation lost: the later write changes the old file. Kept: what was before it is never seen again.
    assert left(recording) == {"f=oo", "f=on", "f=", "f=..", "f=.n"}
    # ext4 writes to new blocks, which the old file does not have.
    assert left(recording, None, "ext4") == {"f=oo", "f=", "f=.n"}


def test_a_new_name_is_lost_without_a_sync_of_the_directory() -> None:
    events = [create(), write(NEW), sync()]
    assert left(run(events, made=[FILE])) == {"", "f=n"}
    assert left(run([*events, sync(inode=ROOT)], made=[FILE])) == {"f=n"}
    assert left(run([*events, sync("data", ROOT)], made=[FILE])) == {"f=n"}
    assert left(run(events, made=[FILE]), None, "ext4") == {"f=n"}


def test_a_rename_may_come_before_the_data() -> None:
    events = [create("t", SECOND), write(NEW, inode=SECOND), rename("t", "f", SECOND, FILE)]
    recording = run(events, OLD, made=[SECOND])
    assert left(recording) == {"f=o", "f=o t=", "f=o t=.", "f=o t=n", "f=", "f=.", "f=n"}
    # ext4 has a rename over a file wait for the data; and one journal.
    assert left(recording, None, "ext4") == {"f=o", "f=o t=", "f=o t=n", "f=n"}
    to_new_name = run([create("t"), write(NEW), rename("t", "f", FILE)], made=[FILE])
    assert left(to_new_name, None, "ext4") == {"", "t=", "t=n", "f=", "f=n"}


@BOTH
def test_fsync_then_rename_is_old_or_new(filesystem: str) -> None:
    events = [create("t", SECOND), write(NEW, inode=SECOND), sync(inode=SECOND), rename("t", "f", SECOND, FILE)]
    recording = run(events, OLD, made=[SECOND])
    expected = {"f=o t=n", "f=n"} | ({"f=o"} if filesystem == "posix" else set())
    assert left(recording, None, filesystem) == expected
    assert left(run([*events, sync(inode=ROOT)], OLD, made=[SECOND]), None, filesystem) == {"f=n"}


def test_names_are_independent_in_posix_and_in_order_in_ext4() -> None:
    recording = run([create("a", FILE), create("b", SECOND)], made=[FILE, SECOND])
    assert left(recording) == {"", "a=", "b=", "a= b="}
    assert left(recording, None, "ext4") == {"", "a=", "a= b="}


def test_an_unlink_may_be_lost() -> None:
    recording = run([Event("unlink", FILE, folder=ROOT, name="f"), create("f", SECOND)], OLD, made=[SECOND])
    assert left(recording) == {"f=o", "", "f="}


def test_fsync_of_one_file_says_nothing_of_another() -> None:
    events = [create("a", FILE), create("b", SECOND), write(NEW), write(NEXT, inode=SECOND), sync(inode=SECOND)]
    recording = run([*events, sync(inode=ROOT)], made=[FILE, SECOND])
    assert left(recording) == {"a= b=x", "a=. b=x", "a=n b=x"}
    assert left(recording, None, "ext4") == {"a= b=x", "a=n b=x"}


@BOTH
def test_sync_file_range_stays_in_the_disks_cache(filesystem: str) -> None:
    events = [write(NEW + NEW), sync("handed", offset=0, length=512)]
    every = {"f=oo", "f=on", "f=no", "f=nn"}
    assert left(run(events, OLD + OLD), None, filesystem) == every
    flushed = [*events, write(NEXT, inode=SECOND), sync("range", SECOND, 0, 512)]
    recording = run(flushed, OLD + OLD, made=[SECOND])
    assert left(recording, None, filesystem) == {"f=no", "f=nn"}


def test_sync_file_range_does_not_cover_the_size() -> None:
    events = [write(NEW, 512), sync("handed"), sync("file", SECOND)]
    assert left(run(events, OLD, made=[SECOND])) == {"f=o", "f=on"}


@BOTH
def test_a_synchronous_write_covers_its_range_and_the_size(filesystem: str) -> None:
    events = [write(NEW), write(NEXT, 512), sync("range", offset=512, length=512)]
    assert left(run(events, OLD), None, filesystem) == {"f=ox", "f=nx"}


def test_emptied_and_written_again() -> None:
    """auto_da_alloc: after close, whatever the journal holds later comes after the data."""
    events = [Event("size", FILE, length=0), write(NEW), Event("close", FILE), create("g", SECOND)]
    recording = run(events, OLD, made=[SECOND])
    assert left(recording, None, "ext4") == {"f=o", "f=", "f=n", "f=n g="}
    assert "f= g=" in left(recording)


@BOTH
def test_sync_of_everything(filesystem: str) -> None:
    events = [create("a", FILE), write(NEW), sync("all", 0)]
    assert left(run(events, made=[FILE]), None, filesystem) == {"a=n"}


@BOTH
def test_every_state_of_the_search_is_one_of_the_model(filesystem: str) -> None:
    events = [create("t", SECOND), write(NEW + NEXT, inode=SECOND), rename("t", "f", SECOND, FILE), write(NEW, 512)]
    model = Model(run(events, OLD, made=[SECOND]), filesystem)
    allowed = [set(model.states(point)) for point in range(model.points)]
    search = Search(model, Options(filesystem, budget=1000))
    assert search.exhaustive
    search.exhaustive = False
    found = list(search.states())
    assert found
    for state, _ in found:
        assert state.lost in allowed[state.point], state
