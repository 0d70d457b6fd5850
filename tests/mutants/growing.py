"""Arrays and lists that grow: mutants, and the part of the battery that notices them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pmstore
from tests.conftest import Medium
from tests.mutants.build import Mutant
from tests.store import test_growing, test_growing_beside, test_lists_full
from tests.support.crashes import assert_survives, record
from tests.support.crashes_growing import GROWING, moves, rows

GROW, ARRAY, COPY = "pmstore/_catalog/growing.py", "pmstore/_values/array.py", "pmstore/_catalog/copying.py"

TREE, ENTRIES = "csrc/space/catalog.c", "csrc/store/entries.c"

NOTICED = [
    Mutant(
        "gap-stays-after-a-refusal",
        "W",
        ENTRIES,
        "pm_catalog_shift(&store->region, prefix, gap + count, -(int64_t)count)",
        "PM_OK",
        "where space ends, a list lacks elements",
        parts=("growing",),
    ),
    Mutant(
        "separator-stays-above-its-keys",
        "W",
        TREE,
        "return how->by < 0 && number > least ? least : number;",
        "return number;",
        "elements of a list can't be found any more",
        parts=("growing",),
    ),
    Mutant(
        "separators-not-shifted",
        "W",
        TREE,
        "if (!in) shift_cells(region, node, how);",
        "if (!in && !node->head.level) shift_cells(region, node, how);",
        "elements of a list can't be found any more",
        parts=("growing",),
    ),
    Mutant(
        "shifted-numbers-not-noted",
        "P",
        TREE,
        "pm_page_edit(region, node);",
        ";",
        "elements are out of place after a crash",
        within="pm_page_edit(region, node);\n        uint8_t *at",
        parts=("growing",),
    ),
    Mutant(
        "rows-that-are-gone-come-back",
        "W",
        GROW,
        "part[...] = 0",
        "pass",
        "new rows show what was in their place",
    ),
    Mutant(
        "spare-rows-not-written",
        "D",
        GROW,
        "write_spare(core, offset, described.nbytes + (0 if new is None else new.nbytes), made.length)",
        "pass",
        "a crash leaves other bytes than those that were hashed",
    ),
    Mutant(
        "appended-rows-not-declared",
        "P",
        GROW,
        "catalog.core.mark(entry.offset, entry.length)",
        "pass",
        "a commit counts rows that it has not",
    ),
    Mutant(
        "damage-moves-unnoticed",
        "D",
        GROW,
        "catalog.core.verify(entry.offset, entry.length, described.nbytes)",
        "pass",
        "a damaged array counts as sound",
    ),
    Mutant(
        "copied-rows-not-verified",
        "D",
        COPY,
        "core.verify(entry.offset, entry.length, count)",
        "pass",
        "the copy of a damaged array counts as sound",
    ),
    Mutant(
        "arrays-of-old-rows-stay-writable",
        "W",
        GROW,
        "catalog.grown.frozen.append((sequence, offset, found[-1]))\n                array.flags.writeable = False",
        "catalog.grown.frozen.append((sequence, offset, found[-1]))",
        "a change is lost without an error",
    ),
    Mutant(
        "arrays-of-rows-that-are-taken-back-stay-writable",
        "W",
        GROW,
        "offset not in offsets",
        "offset != offset",
        "a change is lost without an error",
    ),
    Mutant(
        "arrays-stay-frozen-after-a-rollback",
        "C",
        GROW,
        "array.flags.writeable = True",
        "pass",
        "a live array can't be written",
        within="offset in offsets:\n                array.flags.writeable = True",
    ),
    Mutant(
        "the-last-rows-do-not-move",
        "P",
        GROW,
        "_write(core, offset, 0, old[: described.nbytes])",
        "_write(core, offset, 0, old[: described.nbytes // 2])",
        "rows are lost when they move",
    ),
    Mutant(
        "a-layout-of-another-extent",
        "W",
        GROW,
        "known.meta == entry.meta",
        "True",
        "a name has the length of another array",
    ),
    Mutant(
        "capacity-not-checked",
        "M",
        ARRAY,
        "not axes[0] <= capacity or capacity < 1 or (most is not None and capacity > most)",
        "False",
        "an array is longer than its extent",
    ),
    Mutant(
        "older-arrays-forgotten",
        "W",
        GROW,
        "catalog._live[-id(old)] = old  # close() and `_freeze` still have to find it",
        "pass",
        "a closed store has arrays that can be written",
    ),
]
MUTANTS = [mutant._replace(parts=("growing",)) for mutant in NOTICED]


def growing(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for media in ("memory", "file"):
        for workload in GROWING:
            with opener(directory / f"{workload.__name__}-{media}")(media=media) as store:
                workload(store)
                assert store.check().ok
        with opener(directory / f"move-back-{media}")(media=media) as store:
            test_growing.test_a_rollback_takes_a_move_back(store)
        with opener(directory / f"changes-{media}")(media=media) as store:
            test_growing.test_changes_before_a_move_move_too(store, None)
        for i, growth in enumerate(([4, None], [0, None], [5, 4])):
            with opener(directory / f"hostile-{i}-{media}")(media=media) as store:
                test_growing_beside.test_hostile_descriptions(store, growth)
        for test in (test_growing.test_without_a_move_addresses_stay, test_growing.test_resize):
            with opener(directory / f"{test.__name__}-{media}")(media=media) as store:
                test(store)
        for workload in (rows, moves):
            place = directory / f"crash-{workload.__name__}-{media}"
            place.mkdir()
            assert_survives(record(place / "store.pm", media, workload), budget=200, depth=0)
        declared(opener(directory / f"declared-{media}"), media)
        renamed(opener(directory / f"renamed-{media}"), media)
    for seed in range(2):
        test_lists_full.test_lists_are_as_those_of_python(opener(directory / f"lists-{seed}"), seed)
        test_lists_full.test_I41_where_space_ends_nothing_changes(opener(directory / f"full-{seed}"), seed)
    test_lists_full.test_any_page_may_be_the_last(opener(directory / "pages"))
    place = directory / "damaged"
    test_growing_beside.test_damage(opener(place), Medium("memory", place))
    (other := directory / "before").mkdir()
    test_growing_beside.test_salvage_of_the_rows_before_the_damage(partial(named, other), 9, 9 * 4096 // 40)


def declared(open_: Callable[..., pmstore.Store], media: str) -> None:
    """A declared write set lacks the rows that a transaction appends: the store adds them."""
    store = open_(media=media)
    store.create_array("x", (3000, 100), maxshape=(6000, 100))
    other = store.create_array("other", 10)
    store.commit()
    with store.transaction(only=[other]):
        store.append("x", test_growing.rows(0, 2, 100))
    store._drop(discard=True)
    with open_(media=media) as store:
        assert (store["x"][3000:] == test_growing.rows(0, 2, 100)).all(), "rows that were appended are lost"


def renamed(open_: Callable[..., pmstore.Store], media: str) -> None:
    """Another array takes the extent of one that grew."""
    with open_(media=media) as store:
        test_growing.made(store, 20)
        assert len(store.append("x", test_growing.rows(20, 1))) == 21
        store.rollback()
        test_growing.made(store, 10)
        assert len(store.append("x", test_growing.rows(10, 1))) == 11
        store.commit()
        store.append("x", test_growing.rows(11, 1))
        store.rollback()
        assert len(store.append("x", test_growing.rows(11, 1))) == 12


def opener(directory: Path) -> Callable[..., pmstore.Store]:
    directory.mkdir()
    return partial(pmstore.open, directory / "store.pm")


def named(directory: Path, name: str = "store.pm") -> pmstore.Store:
    return pmstore.open(directory / name)
