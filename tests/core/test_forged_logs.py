"""Logs of several records that no store has written: what recovery adopts, writes and leaves alone."""

from __future__ import annotations

import contextlib
import errno
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore._core import lib
from pmstore.testing._store.recording import Event, Recorder
from tests.conftest import Medium
from tests.support.images import DIRECT, HEADER, LOGGED, OVERFLOW, PAGE, REGION, SLOT, Image
from tests.support.logs import PAGES, SALT, Forged, Item, Record, extent, flip, marker, packed, replayed, run, write_log

WRITES = (lib.PM_EVENT_WRITE, lib.PM_EVENT_STREAM, lib.PM_EVENT_STORE)
SYNCS = (lib.PM_EVENT_SYNC, lib.PM_EVENT_SYNC_RANGE, lib.PM_EVENT_FENCE)


@pytest.fixture
def forged(medium: Medium) -> Forged:
    return Forged(medium)


# ---- what is applied


def random_item(forged: Forged, rng: random.Random, pages: bool) -> Item:
    """A logged range of whole pages, or of any bytes."""
    page = rng.randrange(PAGES)
    at = page * PAGE
    length = rng.randint(1, min(3, PAGES - page)) * PAGE
    if pages:
        length -= rng.choice((0, 0, 64, PAGE - 64))
    else:
        at += rng.choice((0, 1, 64, PAGE - 1))
        length = rng.choice((1, 64, PAGE - 1, PAGE + 1, 2 * PAGE, 2 * PAGE + 64))
        length = min(length, PAGES * PAGE - at)
    return run(forged.at + at, rng.randbytes(length))


def random_records(forged: Forged, rng: random.Random) -> list[Record]:
    """The last record and a few before it may be unsure: what they declare is in its place, and only there."""
    count = rng.randint(1, 4)
    pages = rng.random() < 0.5
    free = list(range(0, PAGES - 3, 3))
    rng.shuffle(free)
    records = []
    for number in range(count):
        items = [random_item(forged, rng, pages) for _ in range(rng.randint(0, 3))]
        for _ in range(rng.randint(0, 2)):
            offset = forged.at + free.pop() * PAGE
            length = rng.choice((1, 64, PAGE - 8, PAGE, PAGE + 1, 2 * PAGE - 16, 2 * PAGE, 3 * PAGE - 24))
            slot = rng.choice((None, 0, 1, 126, 127, 128, 129, 2047, rng.randrange(2048)))
            items.insert(rng.randint(0, len(items)), extent(forged.image, offset, rng.randbytes(length), slot))
        records.append(Record(items, rng.randint(0, number), pages))
    return records


def test_I8_what_a_log_makes_of_a_region(forged: Forged) -> None:
    """The last write of a byte counts, except before a record that declares its page."""
    rng = random.Random(7)
    for _ in range(60):
        forged.again()
        records = random_records(forged, rng)
        forged.save(records)
        forged.becomes(records)


# ---- what is made durable


def recovery_of(forged: Forged) -> list[Event]:
    """The events until the store is open."""
    with Recorder(forged.path, forged.media) as recorder:
        pmstore.open(forged.path)._drop(discard=True)
    events = [recorder.recording.event(number) for number in range(len(recorder.recording))]
    return events[: [event.kind for event in events].index(lib.PM_EVENT_RECOVERED)]


def stages(events: list[Event]) -> Iterator[dict[int, int]]:
    """The bytes that are written before each time that all is made durable, by place."""
    written: dict[int, int] = {}
    for event in events:
        if event.kind in WRITES:
            written.update(zip(range(event.offset, event.offset + event.length), event.data, strict=True))
        elif event.kind in SYNCS:
            yield written
            written = {}


def of_region(offset: int, size: int) -> range:
    return range(REGION + offset, REGION + offset + size)


@pytest.mark.parametrize(
    "knows, marked, unsure, waits",
    [
        ((0, 0, 0, 0), 0, 4, True),
        ((0, 1, 1, 1), 0, 3, True),
        ((0, 1, 2, 2), 0, 2, True),
        ((0, 1, 2, 3), 0, 1, False),
        ((0, 0, 0, 3), 0, 1, False),
        ((0, 0, 0, 0), 2, 2, True),
        ((0, 1, 1, 1), 4, 1, True),
        ((0, 1, 2, 3), 4, 1, False),
    ],
)
def test_I14_records_that_may_not_be_durable_are_made_so_first(
    forged: Forged, knows: tuple[int, ...], marked: int, unsure: int, waits: bool
) -> None:
    """They and what they declare are durable before the marker; if there are several, it is so before the image."""
    image, at, free = forged.image, forged.at, 40 * PAGE
    items = [
        [run(at, b"0" * PAGE)],
        [extent(image, at + PAGE, b"1" * 5000), run(at + 3 * PAGE, b"2" * PAGE)],
        [extent(image, at + 4 * PAGE, b"3" * (PAGE - 8), slot=3), run(at + 6 * PAGE, b"4" * PAGE)],
        [run(at + 9 * PAGE, b"5" * PAGE), extent(image, at + 12 * PAGE, b"6" * 100)],
    ]
    records = [Record(some, known, pages=True) for some, known in zip(items, knows, strict=True)]
    records[2] = records[2]._replace(overflow=free)
    places = forged.save(records)
    sequence = image.word(HEADER["sequence"])
    if marked:
        image.bytes[2048:2064] = marker(image, sequence + marked)
        image.save()
    before = bytes(image.bytes)
    first, second, third, *_ = stages(recovery_of(forged))
    wanted: set[int] = set()
    for record, (place, length) in list(zip(records, places, strict=True))[-unsure:]:
        wanted.update(range(place, place + length))
        for item in record.items:
            wanted.update(of_region(item.offset, item.size) if item.kind != LOGGED else ())
        wanted.update(of_region(free, sum(16 + len(item.data) for item in record.items)) if record.overflow else ())
    assert first == {place: before[place] for place in wanted}
    said = dict(zip(range(2048, 2064), marker(image, sequence + 4), strict=True))
    applied = {
        place: byte
        for record in records
        for item in record.items
        if item.kind == LOGGED
        for place, byte in zip(of_region(item.offset, item.length), item.data, strict=True)
    }
    assert {place: second[place] for place in said} == said
    assert ({**second, **third} if waits else second) == {**said, **applied}
    assert not waits or second == said


def test_on_memory_the_marker_is_flushed_where_the_image_waits_for_it(forged: Forged) -> None:
    for knows in (0, 1):
        forged.again()
        forged.save([Record([run(forged.at, b"x" * PAGE)], 0), Record([run(forged.at, b"y" * PAGE)], knows)])
        events = [event for event in recovery_of(forged) if event.offset == 2048 and event.length]
        kinds = [event.kind for event in events if event.kind == lib.PM_EVENT_FLUSH]
        assert len(kinds) == (forged.media == "memory" and not knows)


@pytest.mark.parametrize("operation", [lib.PM_OPERATION_WRITE, lib.PM_OPERATION_SYNC], ids=["write", "sync"])
def test_D7_an_error_at_any_step_ends_a_recovery(tmp_path: Path, operation: int) -> None:
    forged = Forged(Medium("file", tmp_path))
    items = [
        [run(forged.at, b"0" * PAGE), run(forged.at + 2 * PAGE, b"0" * 64)],
        [extent(forged.image, forged.at + 4 * PAGE, b"1" * 9000), run(forged.at + 8 * PAGE, b"2" * PAGE)],
    ]
    for pages in (False, True):
        records = [Record(items[0], 0, pages), Record(items[1], 0, pages, overflow=40 * PAGE)]
        forged.save(records)
        for number in range(1, 100):
            forged.image.save()
            with Recorder(forged.path, "file") as recorder:
                recorder.trace.fail(operation, number, errno.EIO)
                try:
                    pmstore.open(forged.path)._drop(discard=True)
                    raised = False
                except pmstore.StoreIOError:
                    raised = True
                assert raised == bool(recorder.trace.operations()[1]), number
            if not raised:
                break
        assert number > (12 if operation == lib.PM_OPERATION_WRITE else 3)
        forged.image.save()
        forged.becomes(records)


@pytest.fixture
def large(directory: Path) -> Image:
    """A closed store with an array of ten megabytes, and room for a log of four."""
    path = directory / "large.pm"
    with pmstore.open(path, "x", media="file") as store:
        store["x"] = np.zeros((2500, 512))
    image = Image(path)
    image.bytes[image.log_offset :] = bytes(4 << 20)
    image.set_header(log_size=4 << 20)
    return image


def test_the_disk_writes_back_while_pages_are_copied(large: Image) -> None:
    """It is asked after each megabyte, and once for each page. Each of its errors ends the recovery."""
    items = [run(100 * PAGE, b"1" * 700 * PAGE), *(run(i * PAGE, b"2" * PAGE) for i in range(900, 990, 7))]
    write_log(large, [Record(items, 0, pages=True)])
    told: list[tuple[int, int]] = []
    for number in range(1, 20):
        large.save()
        with Recorder(large.path, "file") as recorder:
            recorder.trace.sync_ranges(True)
            recorder.trace.fail(lib.PM_OPERATION_SYNC, number, errno.EIO)
            with contextlib.suppress(pmstore.StoreIOError):
                pmstore.open(large.path)._drop(discard=True)
                break
        events = [recorder.recording.event(at) for at in range(len(recorder.recording))]
        told += [(event.offset, event.length) for event in events if event.kind == lib.PM_EVENT_SYNC_FAILED]
    assert not recorder.trace.operations()[1], "a call that fails is an error"
    events = [recorder.recording.event(at) for at in range(len(recorder.recording))]
    writes = [(event.offset, event.length) for event in events if event.kind == lib.PM_EVENT_WRITE]
    writes = writes[[at for at, _ in writes].index(2048) + 1 :]
    image = [(at, length) for at, length in writes if at >= REGION]
    assert [length for _, length in image] == [1 << 20] * 2 + [188 * PAGE] + [PAGE] * 13
    told = [(at, length) for at, length in told if REGION <= at < large.log_offset]
    ends = [sum(image[number]) for number in (0, 1, 3)]
    assert told == [(at, end - at) for at, end in zip([REGION, *ends], ends)]


def test_pages_are_found_wherever_they_are(large: Image) -> None:
    """Recovery looks through the region in steps of 512 pages. Some steps have no page, and some one at an end."""
    for pages in ((512,), (1023, 2048), (511, 1024), (2047,), (20, 2500)):
        records = [Record([run(page * PAGE, b"%d" % page * 1024)], number, True) for number, page in enumerate(pages)]
        write_log(large, records)
        large.save()
        pmstore.open(large.path, media="file")._drop(discard=True)
        assert large.path.read_bytes()[REGION : large.log_offset] == replayed(large, records, cut=True)


def test_a_log_of_many_records(large: Image) -> None:
    records = [Record([run((100 + number % 7) * PAGE, bytes([number]) * PAGE)], number) for number in range(256)]
    write_log(large, records)
    large.save()
    with pmstore.open(large.path, media="file") as store:
        assert store.stats().records_replayed == 256
    assert large.path.read_bytes()[REGION : large.log_offset] == replayed(large, records, cut=True)


# ---- what is adopted


LOST, BEYOND, ITSELF = "lost its contents", "points outside the store", "its own list of changes"


def broken(forged: Forged, how: int | str) -> Item:
    """An extent that lacks its hash, or has a wrong byte at this place."""
    item = extent(forged.image, forged.at + 6 * PAGE, b"d" * 8200)
    if isinstance(how, str):
        return item._replace(data=bytes([item.data[0] ^ 1]) + item.data[1:])
    flip(forged.image, REGION + item.offset + how)
    return item


@pytest.mark.parametrize(
    "knows, marked, adopted",
    [
        ((None,), 0, 0),
        ((None,), 1, LOST),
        ((0, None), 0, 1),
        ((0, None), 1, 1),
        ((0, None), 2, LOST),
        ((0, None, 0), 0, 1),
        ((0, None, 1), 0, 1),
        ((0, None, 1, 1), 0, 1),
        ((0, None, 2), 0, 3),
        ((0, None, 1, 2), 0, 4),
        ((0, None, 1), 2, 3),
    ],
)
def test_I14_the_first_record_without_its_contents_ends_the_log(
    forged: Forged, knows: tuple[int | None, ...], marked: int, adopted: int | str
) -> None:
    """Unless it was durable: then the file is damaged, if this is the newest record; the contents that an earlier one
    declared may have changed since.
    """
    for overflow in (0, 40 * PAGE):
        image = forged.again()
        records = [Record([run(forged.at + i * PAGE, b"x" * PAGE)], known or 0) for i, known in enumerate(knows)]
        number = knows.index(None)
        items = [*records[number].items, broken(forged, 8190)]
        records[number] = records[number]._replace(items=items, overflow=overflow)
        forged.save(records)
        if marked:
            image.bytes[2048:2064] = marker(image, image.word(HEADER["sequence"]) + marked)
        forged.opens_with(adopted)
        if adopted == LOST:
            with pytest.raises(pmstore.CorruptStoreError, match=f"{LOST}[^(]*$"):  # no advice to salvage it
                pmstore.salvage(image.path, image.path.with_name("new.pm"))


def test_contents_count_up_to_their_last_byte(forged: Forged) -> None:
    for how in (0, PAGE, 8191, 8192, 8199, 8200, 8208, 8216, 8223, "hash"):
        forged.again()
        forged.save([Record([broken(forged, how)], 0)])
        forged.opens_with(0)
    forged.again()
    forged.save([Record([broken(forged, 8224)], 0)])
    forged.opens_with(1)


def test_items_in_the_region_are_verified(forged: Forged) -> None:
    """A list of changes that is damaged is as good as lost."""
    at, place, some = forged.at, 40 * PAGE, run(forged.at + PAGE, b"y" * PAGE)
    beyond, more = run(forged.image.region_size, b"z" * 64), run(at + 8 * PAGE, b"z" * 7000)
    inner = Item(OVERFLOW, place + 8 * PAGE, 64, bytes(16))
    for known in (0, 1):
        for damage, items in ((True, [some, more]), (False, [some, beyond]), (False, [some, inner])):
            for byte in (0, 5000, -1) if damage else (0,):
                image = forged.again()
                forged.save([Record([run(at, b"x" * PAGE)], 0), Record(items, known, overflow=place)])
                if damage:
                    flip(image, REGION + place + byte % sum(16 + item.length for item in items))
                forged.opens_with(1)
                image.bytes[2048:2064] = marker(image, image.word(HEADER["sequence"]) + 2)
                forged.opens_with(LOST)
            image = forged.again()  # without the marker
            forged.save([Record([run(at, b"x" * PAGE)], 0), Record(items, known, overflow=place), Record([], 2)])
            flip(image, REGION + place)
            forged.opens_with(LOST)


def test_items_in_the_region_stay_until_they_are_applied(forged: Forged) -> None:
    """A logged range may end where they begin, and begin where they end."""
    at, place = forged.at, 10 * PAGE + forged.at
    items = [run(at, b"x" * 100), run(at + 200, b"y" * 84)]
    end = place + 100 + 84 + 32
    for beside in (run(place - 64, b"a" * 64), run(end, b"b" * 64)):
        for record in (0, 1, 2):
            forged.again()
            records = [Record([run(at + 3 * PAGE, b"x" * 64)], i) for i in range(3)]
            records[1] = Record(items, 1, overflow=place)
            records[record] = records[record]._replace(items=[*records[record].items, beside])
            if record == 1:
                beside = run(end + 80, b"b" * 64) if beside.offset == end else beside
                records[1] = records[1]._replace(items=[*items, beside])
            forged.save(records)
            forged.becomes(records)
    for over in (run(place - 63, b"a" * 64), run(end - 1, b"b" * 64), run(place - 64, b"c" * PAGE), run(place, b"d")):
        for record in (0, 2):
            forged.again()
            records = [Record([run(at + 3 * PAGE, b"x" * 64)], i) for i in range(3)]
            records[1] = Record(items, 1, overflow=place)
            records[record] = records[record]._replace(items=[*records[record].items, over])
            forged.save(records)
            forged.opens_with(ITSELF)
    forged.again()
    forged.save([Record(items, i, overflow=place + i * PAGE) for i in range(2)])
    forged.opens_with(ITSELF)


def test_D9_items_stay_in_the_region(forged: Forged) -> None:
    size, at = forged.image.region_size, forged.at
    direct = bytes(16)
    small = extent(forged.again(), size - PAGE, b"e" * (PAGE - 8))
    refused = [
        run(size - 63, bytes(64)),
        run(size, bytes(64)),
        run((1 << 64) - 64, bytes(64)),
        run(at, b""),
        small._replace(offset=size - PAGE + 64),
        small._replace(offset=at + 8),
        small._replace(length=PAGE),
        small._replace(length=0),
        small._replace(length=(1 << 56) - 1),
        small._replace(length=(1 << 42) - 1),
        small._replace(offset=size),
        Item(SLOT, small.offset, small.length, struct.pack("<QQ", 0, 2048)),
        Item(SLOT, at + 64, 64, direct),
        Item(OVERFLOW, at + 64, 64, direct),
        Item(OVERFLOW, size, 64, direct),
        Item(OVERFLOW, size - PAGE, PAGE + 1, direct),
        Item(0, at, 16, direct),
        Item(5, at, 16, direct),
        Item(LOGGED, at, 100, bytes(99)),
        Item(DIRECT, at, 64, bytes(15)),
        Item(LOGGED, at, 64, bytes(65)),
        Item(LOGGED, at, 64, bytes(79)),
    ]
    for item in refused:
        forged.again()
        forged.save([Record([run(at, b"x" * 64)], 0), Record([run(at, b"y" * 64), item], 1)], sound=False)
        forged.opens_with(BEYOND)
    forged.again()
    forged.save([Record([Item(OVERFLOW, 40 * PAGE, 64, direct), run(at, b"y" * 64)], 0)], sound=False)
    forged.opens_with(BEYOND)
    for last in (run(size - 64, b"l" * 64), small, extent(forged.image, size - PAGE, b"e" * (PAGE - 8), slot=2047)):
        image = forged.again()
        image.bytes[REGION + size - PAGE : REGION + size] = b"e" * PAGE
        if last.kind != LOGGED:
            last = extent(image, last.offset, b"e" * (PAGE - 8), slot=2047 if last.kind == SLOT else None)
        records = [Record([last], 0)]
        forged.save(records)
        forged.becomes(records)


def test_D6_a_header_of_a_record_that_is_none_ends_the_log(forged: Forged) -> None:
    """The record is whole, and every hash in it is right."""
    at, first = forged.at, forged.image.word(HEADER["sequence"])
    heads: list[dict[str, int]] = [
        {"magic": 1},
        {"kind": 2},
        {"kind": 0},
        {"sequence": first + 1},
        {"sequence": first + 3},
        {"salt": SALT + 1},
        {"length": PAGE + 32},
        {"length": PAGE - 1},
        {"length": 0},
        {"length": 64},
        {"length": 128},
        {"length": forged.image.log_size - PAGE + 64},
        {"length": 1 << 31},
        {"body": PAGE - 63},
        {"body": (1 << 32) - 64},
        {"hash": 1},
        {"behind": 0},
        {"behind": first + 3},
        {"behind": (1 << 32) - 1},
    ]
    for head in heads:
        forged.again()
        forged.save([Record([run(at, b"x" * 64)], 0), Record([run(at, b"y" * 64)], 0, head=head)])
        forged.opens_with(1)
    for head in ({"behind": first + 2}, {"length": 192}, {"length": forged.image.log_size - PAGE}):
        forged.again()
        forged.save([Record([run(at, b"x" * 64)], 0), Record([run(at, b"y" * 64)], 0, head=head)])
        forged.opens_with(2)
    empty, full = Record([], 0, head={"length": 64}), Record([run(at, b"z" * (PAGE - 80))], 0)
    records = [Record([run(at, b"x" * 64)], 0), empty, full]
    forged.again()
    forged.save(records)
    forged.becomes(records)


def test_D6_a_record_anywhere_behind_the_end_may_tell_that_more_was_durable(forged: Forged) -> None:
    """The second record is torn. One that was built when it was durable proves that it was."""
    at = forged.at
    size = forged.image.log_size
    for gap in (64, 192, PAGE, size - 4 * PAGE):
        for known, found in ((1, 1), (2, "was durable, and can't be read")):
            image = forged.again()
            (_, (torn, _), (third, length)) = forged.save(
                [
                    Record([run(at, b"x" * 64)], 0),
                    Record([run(at, b"y" * 64)], 0),
                    Record([run(at, b"z" * 64)], known),
                ]
            )
            image.bytes[third : third + length] = bytes(length)
            flip(image, torn + 100)
            place = torn + gap
            record = Record([run(at, b"z" * 64)], known)
            image.bytes[place : place + 144] = packed(record, 3, image, place)[0][:144]
            if found == 1:
                forged.rehash(forged.image.bytes[REGION:][forged.array])
            forged.opens_with(found)
            flip(image, place + 143)  # its body is damaged, so that it proves nothing
            forged.opens_with(1)


def test_D6_without_a_marker_a_torn_first_commit_is_none(forged: Forged) -> None:
    """The store had no commit before it."""
    forged.image.set_header(sequence=0)
    ((place, _),) = forged.save([Record([run(forged.at, b"x" * 64)], 0)])
    flip(forged.image, place + 100)
    forged.rehash(forged.image.bytes[REGION:][forged.array])
    forged.opens_with(0)
    forged.image.bytes[2048:2064] = marker(forged.image, 1)
    forged.opens_with("was durable, and can't be read")
