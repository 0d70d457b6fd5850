"""The tests that every mutant must fail: crashes, faults, damage, creation and a model. Run in a process of its own.

python -m tests.mutants.battery [part …]      prints a line for each case that it tries, and as a last line of JSON
                                              the first case that noticed something, if any did; with --quick before
                                              the parts, fewer crashes. The part crash has a case for each workload:
                                              "crash/names-memory" is a part, too
python -m tests.mutants.battery --kinds       the problems that each kind of crash state notices by itself
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

import pmstore
from pmstore._core import lib
from pmstore.testing._store.engine import KINDS, Found, Options, explore
from pmstore.testing._store.recording import PACE, Recorder, Recording
from tests.conftest import Medium
from tests.core import test_async, test_forks, test_schedule, test_shared_blocks, test_transaction_lock, test_write_back
from tests.core.test_trackers import committed
from tests.mutants.anew import anew
from tests.mutants.archives import archives
from tests.mutants.beside import beside
from tests.mutants.build import small_files
from tests.mutants.creation import names_of_new_files
from tests.mutants.damage import Evaluated, Noticed, damage
from tests.mutants.formats import formats
from tests.mutants.growing import growing
from tests.store import test_abandoned, test_finalizers, test_interrupts
from tests.support import crashes, crashes_new, crashes_slots, crashes_threads
from tests.support.snapshots import snapshot

BUDGET, DEPTH = 500, 2
QUICK = 50, 0
KINDS_BUDGET = 200
PARTS = (
    "crash",
    "model",
    "readers",
    "creation",
    "damage",
    "faults",
    "lack_of_space",
    "large",
    "transaction_lock",
    "write_back",
    "forks",
)
PARTS += ("anew", "beside", "archives", "growing", "formats")


class Caught(NamedTuple):
    """The case that noticed a mutant. part: or the case of it. kind: of the crash state, or the kind of another
    problem. nested: a crash in or after a recovery.
    """

    part: str
    kind: str
    nested: bool
    text: str


def look(found: Found | None) -> None:
    if found is not None:
        schedule, verdict = found
        raise Noticed(schedule.levels()[-1].kind, f"{verdict.problem}: {verdict.text}", schedule.then is not None)


# ---- crashes


def media_of(options: dict[str, Any]) -> tuple[str, ...]:
    return ("file",) if options.get("durability") == "async" else ("memory", "file")


def recordings(directory: Path) -> Iterator[tuple[str, Callable[[], Recording | None]]]:
    """The recordings to explore: a name, and the function that records it; it returns None if the failing call is
    past the end."""

    def planned(name: str, runs: tuple[crashes.Workload, ...], medium: str, options: dict[str, Any]) -> Recording:
        path = directory / f"{name}.pm"
        try:
            return crashes.record(path, medium, *runs, readers=False, **options)
        finally:
            path.unlink(missing_ok=True)

    for name, runs, options in crashes.PLANS:
        for medium in media_of(options):
            yield f"{name}-{medium}", partial(planned, f"{name}-{medium}", runs, medium, options)

    def by_threads() -> Recording:
        with crashes_threads.commits_by_other_threads():
            return planned("threads-memory", (crashes.reuse,), "memory", {})

    yield "threads-memory", by_threads

    def failed(name: str, workload: crashes.Workload, number: int, **options: Any) -> Recording | None:
        return crashes.record_failed_sync(directory / f"{name}.pm", workload, number, **options)

    for number in (3, 5, 10, 15, 20):
        yield f"failed-{number}", partial(failed, f"failed-{number}", crashes.reuse, number)
    # The first half is the creation of the array. Of the others, every second one is of a record that declares a slot.
    syncs = crashes.count_syncs(directory / "flips.pm", crashes_slots.flips)
    for number in range(syncs // 2, syncs + 1):
        yield f"failed-flip-{number}", partial(failed, f"failed-flip-{number}", crashes_slots.flips, number)
    for number, pace in ((4, 0), (6, 0), (8, 0), (9, PACE)):  # 0: many commits are not durable yet
        name = f"failed-async-{number}"
        yield name, partial(failed, name, crashes.lazily, number, pace=pace, **crashes.ASYNC)

    def torn(medium: str, place: int) -> Recording:
        path = directory / f"torn-{medium}-{place}.pm"
        try:
            return crashes.record_torn_header(path, medium, place)
        finally:
            path.unlink(missing_ok=True)

    for medium in ("memory", "file"):
        for place in (0, 4096):
            yield f"torn-{medium}-{place}", partial(torn, medium, place)


def crash(record: Callable[[], Recording | None]) -> None:
    recording = record()
    if recording is None:
        return
    tally, found = explore(recording, Options(budget=BUDGET, seed=1, depth=DEPTH))
    Evaluated.states += tally.evaluated
    look(found)
    if recording.medium == "memory":  # memory has few states; a sample of all kinds would leave too few
        tally, found = explore(recording, Options(budget=3 * BUDGET, seed=1, kinds=("torn",)))
        Evaluated.states += tally.evaluated
        look(found)


def readers(directory: Path) -> None:
    """The file of a killed process, read by a process that writes nothing."""
    for name, runs, options in crashes.PLANS:
        for medium in media_of(options):
            crashes.record(directory / f"{name}-{medium}.pm", medium, *runs, **options)


def large(directory: Path) -> None:
    for workload in crashes.LARGE:
        path = directory / "large.pm"
        recording = crashes.record(path, "memory", workload)
        path.unlink()
        tally, found = explore(recording, Options(budget=16, seed=1, kinds=crashes.NOT_STALE))
        Evaluated.states += tally.evaluated
        look(found)


# ---- a model


SIZES = (0, 1, 7, 8, 511, 512, 513, 1500, 9000)


def arguments_of(rule: str, rng: random.Random) -> dict[str, Any]:
    """The arguments of a rule of the machine in tests/store/test_model.py."""
    from tests.store.test_model import DTYPES, NAMES, SHAPES, VALUES

    names, dtypes, shapes, values = (strategy.elements for strategy in (NAMES, DTYPES, SHAPES, VALUES))
    everything = {
        "name": rng.choice(names),
        "size": rng.choice(SIZES),
        "fill": rng.randint(1, 9),
        "dtype": rng.choice(dtypes),
        "shape": rng.choice(shapes),
        "order": rng.choice("CF"),
        "bits": rng.randint(0, 1),
        "at": rng.randint(-3, 3) if rule == "change_list" else rng.randint(0, 9000),
        "length": rng.randint(1, 3000),
        "value": rng.randint(0, 99) if rule == "write" else rng.choice(values),
        "what": rng.choice(("append", "insert", "set", "delete")),
        **{name: rng.random() < 0.4 for name in ("hold", "through", "fails", "doomed", "crash")},
    }
    return {name: everything[name] for name in RULES[rule].split()}


def model(directory: Path) -> None:
    """Random operations, by the machine of tests/store/test_model.py, which knows the correct results."""
    from tests.store.test_model import OnFile, OnMemory

    rules = [rule for rule in RULES for _ in range(OFTEN.get(rule, 1))]
    for seed in range(12):
        rng = random.Random(seed)
        machine = (OnMemory if seed % 2 else OnFile)()
        machine.parent = directory
        machine.start()
        for _ in range(60):
            rule = rng.choice(rules)
            getattr(machine, rule)(**arguments_of(rule, rng))
            machine.same()
        machine.check()
        machine.teardown()
    over_two_runs(directory / "runs.pm")


def over_two_runs(path: Path) -> None:
    with pmstore.open(path) as store:
        store.create_list("first").append(1)
        x = store.create_array("x", 3)
    assert not x.flags.writeable, "an array of a closed store can be written"
    with pmstore.open(path) as store:
        store.create_list("second").append(2)
        assert (list(store["first"]), list(store["second"])) == ([1], [2]), "two lists share their elements"
        before = store.stats().keys
        store["first"] = 5
        assert store.stats().keys == before - 1, "the elements of a list that was replaced are still there"
        thing = pmstore.Parts("lib.Thing", {"x": np.arange(3.0), "k": 1})
        store["one"], store["other"] = thing, thing
        store["one"]["x"][0] = 7
        assert store["other"] == thing, "two objects share their parts"
        before = store.stats().keys
        store["one"] = 5
        store["other"] = thing
        assert store.stats().keys == before - 2, "the parts of an object that was replaced are still there"


RULES = {
    "create": "name size fill",
    "assign": "name size fill hold",
    "assign_value": "name value",
    "assign_other": "name dtype shape order bits",
    "clear_group": "",
    "hold": "name",
    "let_go": "name",
    "let_go_of_detached": "",
    "write": "name at length value through",
    "delete": "name",
    "make_list": "name",
    "change_list": "name value at what",
    "commit": "",
    "roll_back": "",
    "transact": "name fails doomed",
    "release": "",
    "reopen": "crash",
    "check": "",
}
OFTEN = {"assign": 2, "hold": 2, "write": 3, "commit": 2, "roll_back": 2, "change_list": 2, "create": 2}


# ---- creation


def creation(directory: Path) -> None:
    for medium in ("memory", "file"):
        names_of_new_files(directory, medium)
        look(explore_creation(directory / f"new-{medium}.pm", medium))
        look(explore_renumbering(directory / f"renumbered-{medium}.pm", medium))
        (place := directory / medium).mkdir()
        test_shared_blocks.test_a_copy_with_holes_that_is_longer_than_its_store(Medium(medium, place))


def explore_creation(path: Path, medium: str) -> Found | None:
    tally, found = crashes_new.explored_creation(path, medium, budget=BUDGET)
    Evaluated.states += tally.evaluated
    return found


def explore_renumbering(path: Path, medium: str) -> Found | None:
    tally, found = crashes_new.explored_renumbering(path, medium, budget=BUDGET)
    Evaluated.states += tally.evaluated
    return found


# ---- faults


def faults(directory: Path) -> None:
    codes = (
        (lib.PM_OPERATION_SYNC, errno.EIO, False),
        (lib.PM_OPERATION_WRITE, errno.EIO, False),
        (lib.PM_OPERATION_WRITE, errno.ENOSPC, False),
        (lib.PM_OPERATION_WRITE, 0, False),
        (lib.PM_OPERATION_WRITE, errno.EINTR, False),
        (lib.PM_OPERATION_SYNC, errno.ENOSPC, False),
        (lib.PM_OPERATION_GROW, errno.ENOSPC, True),
        (lib.PM_OPERATION_GROW | lib.PM_OPERATION_WRITE, errno.ENOSPC, True),
        (lib.PM_OPERATION_GROW, errno.ENOSPC, False),
        (lib.PM_OPERATION_GROW, errno.EIO, False),
        (lib.PM_OPERATION_MAP, errno.ENOMEM, False),
    )
    for medium in ("file", "memory"):
        path = directory / f"faults-{medium}.pm"
        with pmstore.open(path, "x", media=medium) as store:
            fault_steps(store, {}, -1)
        base = path.read_bytes()
        for operations, code, lasting in codes:
            at = 0
            while True:
                at += 1 if operations == lib.PM_OPERATION_SYNC else 1 + at // 6
                path.write_bytes(base)
                if not faulty(path, medium, (operations, at, code, lasting)):
                    break


def lack_of_space(directory: Path) -> None:
    """Writes of the committed image, and of parts of a record, that fail after the record is durable, or before."""
    for evaluate in (
        partial(test_shared_blocks.test_no_commit_is_lost_behind_a_write_that_lacked_space, durability="sync"),
        partial(test_shared_blocks.test_no_commit_is_lost_behind_a_write_that_lacked_space, durability="async"),
        partial(test_shared_blocks.test_I13_a_slot_is_not_written_while_a_run_waits_for_it, number=2, then="rollback"),
        partial(test_shared_blocks.test_commits_that_can_not_be_written_back_are_durable_all_the_same, how="close"),
        test_shared_blocks.test_the_thread_comes_back_when_there_is_space_again,
        partial(test_schedule.test_a_part_that_is_not_written_is_written_again, error=errno.EIO),
        partial(test_schedule.test_a_part_that_is_not_written_is_written_again, error=0),
        test_shared_blocks.test_I11_nothing_is_committed_before_a_rollback_that_lacked_space,
    ):
        (directory / "store.pm").unlink(missing_ok=True)
        evaluate(directory)


def fault_steps(store: pmstore.Store, state: dict[str, Any], step: int) -> None:
    """One transaction of the workload, or (-1) the contents before it; `state` follows."""
    if step == -1:
        store["a"] = np.zeros(700)
        store["big"] = np.zeros(9000)
        store["v"] = 0
        return
    store["v"] = step
    store["a"][: 100 * (step + 1)] += 1
    if step % 2:
        store[f"new{step}"] = np.full(30_000 if step == 3 else 1500, float(step))
    if step == 4:
        store.pop("new1", None)
        store["big"][:] += 1
    if step == 5:
        store["big"][::600] += 1  # one change in each page: the record is written in parts


def faulty(path: Path, medium: str, fault: tuple[int, int, int, bool]) -> bool:
    """False if there are fewer operations."""
    states: list[dict[str, Any]] = []
    acknowledged = begun = 0
    refused = happened = False
    with Recorder(path, medium) as recorder:
        recorder.trace.sync_ranges(fault[1] % 2 == 1)  # also as on ext4 and xfs
        store = pmstore.open(path)
        states.append(snapshot(store))
        recorder.trace.fail(*fault)
        for step in range(6):
            try:
                fault_steps(store, {}, step)
                begun = len(states)
                states.append(snapshot(store))
                store.commit()
                acknowledged = begun
            except (pmstore.OutOfSpaceError, pmstore.OutOfMemoryError) as error:
                happened = True
                recorder.trace.fail(0, 0, 0)
                try:
                    pending = snapshot(store)
                    store.commit()  # the fault is gone: the pending changes are still there
                except pmstore.FailedStoreError:
                    if isinstance(error, pmstore.OutOfSpaceError):
                        raise
                    refused = True
                    break
                states.append(pending)
                acknowledged = begun = len(states) - 1
            except pmstore.Error:
                refused = True
                break
        _, faults = recorder.trace.operations()
        happened = happened or faults > 0
        recorder.trace.fail(0, 0, 0)
        if refused:
            refuses(store, fault)
        store._drop(discard=True)
    tally, found = explore(recorder.recording, Options(budget=60, seed=1, depth=min(1, DEPTH)))
    Evaluated.states += tally.evaluated
    look(found)
    with pmstore.open(path, media=medium) as store:
        now = snapshot(store)
        report = store.check()
        if not report.ok:
            raise Noticed("after a fault", f"{report}")
        if fault[0] == lib.PM_OPERATION_SYNC and happened and not refused:
            raise Noticed("after a fault", f"fault {fault}: a sync failed, and the store goes on")
        if fault[2] == errno.EINTR and refused:
            raise Noticed("after a fault", "an interrupted write stops the store")
        if now not in states[acknowledged : begun + 1]:
            raise Noticed("after a fault", f"fault {fault}: reopened to another state")
        store["v"] = "later"
        store.commit()
    return happened


def refuses(store: pmstore.Store, fault: tuple[int, int, int, bool]) -> None:
    try:
        store["v"] = "more"
        store.commit()
    except pmstore.Error:
        return
    raise Noticed("after a fault", f"fault {fault}: the store goes on")


# ---- threads


def transaction_lock(directory: Path) -> None:
    for handler in (None, "commit"):
        with pmstore.open(directory / "store.pm", "w") as store:
            test_transaction_lock.test_no_half_of_a_transaction_is_in_a_commit_beside_it(store, handler)
    with pmstore.open(directory / "store.pm", "w") as store:
        test_interrupts.test_a_transaction_that_dies_inside_is_rolled_back(store, passing=False)
    abandoned(directory)


def abandoned(directory: Path) -> None:
    uses: tuple[Callable[[pmstore.Store], None], ...] = (
        test_abandoned.test_what_a_thread_did_before_and_after_goes_together,
        test_abandoned.test_the_collector_of_another_thread,
        test_abandoned.test_a_reference_counted_to_zero_in_the_middle_of_an_assignment,
        partial(test_finalizers.in_the_middle_of_an_operation, action="rollback", method="put"),
        test_finalizers.test_a_signal_handler_in_the_middle_of_reading_does_not_wait_for_a_thread_that_waits,
    )
    for use in uses:
        with pmstore.open(directory / "abandoned.pm", "w") as store:
            use(store)


def write_back(directory: Path) -> None:
    """The work of the core's threads, and a failed attempt of one."""
    for medium in ("memory", "file"):
        opener = partial(pmstore.open, directory / f"write-back-{medium}.pm", media=medium)  # type: ignore[call-arg,arg-type]
        test_write_back.test_a_store_that_is_closed_at_once_has_it_all(opener)
    test_write_back.test_D7_a_sync_that_fails_after_a_small_commit_is_reported(directory)
    compared_by_two(directory)
    test_async.test_D7_a_failed_sync_is_told_by_close_if_by_no_other_call(directory)
    test_schedule.test_runs_after_a_crash_have_background_work_too(directory)


def compared_by_two(directory: Path) -> None:
    """Large arrays, which the crash explorer doesn't have. The last page is incomplete, and the changes that two
    threads found are gathered again where the record overflows the log.
    """
    os.environ["PMSTORE_TRACKER"] = "compare"
    try:
        with pmstore.open(directory / "compared.pm", "w", media="file") as store:
            w = store.create_array("w", 1500 * 512 + 100)
            for at in (slice(-1, None), slice(511, None, 512), slice(512 * 64, 512 * 64 + 1)):
                store.commit()
                w[at] += 1
                w[-1] += 1
                store.commit()
                assert (committed(store)["w"] == w).all(), "a change is lost"
    finally:
        del os.environ["PMSTORE_TRACKER"]


def forks(directory: Path) -> None:
    """The contents that forked children see."""
    place = Medium("auto", directory)

    def opener(name: str = "store.pm", mode: Any = "a") -> pmstore.Store:
        return pmstore.open(directory / name, mode)

    for evaluate in (
        test_forks.test_I18_a_child_sees_no_commit_of_its_parent,
        partial(test_forks.test_I18_what_was_deleted_keeps_its_space_while_a_child_lives, how="os.fork"),
        partial(test_forks.test_I18_after_the_parent_has_closed_the_store, mode="a"),
        test_forks.test_space_is_used_again_when_the_children_are_gone,
        test_forks.test_what_can_not_change_is_not_copied_whatever_read_it_before,
        partial(test_forks.test_I18_where_the_parent_is_killed_and_the_store_recovered, medium=place),
    ):
        (directory / "store.pm").unlink(missing_ok=True)
        with test_forks.ended_children() as child:
            evaluate(open_store=opener, child=child)


# ---- the process


def run(parts: tuple[str, ...], quick: bool = False) -> Caught | None:
    global BUDGET, DEPTH
    if quick:
        BUDGET, DEPTH = QUICK
    directory = Path(tempfile.mkdtemp(prefix=f"pmstore-mutant-{os.getpid()}-", dir="/dev/shm"))
    current = ""
    try:
        for name, case in cases(directory, parts):
            current = name
            case()
    except Noticed as noticed:
        return Caught(current, noticed.kind, noticed.nested, str(noticed))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        return Caught(current, "running", False, text[:300])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return None


def cases(directory: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The cases: a name, and a function that raises if it notices something."""
    every = (model, readers, creation, damage, faults, lack_of_space, large, transaction_lock, write_back, forks)
    every += (anew, beside, archives, growing, formats)
    functions: dict[str, Callable[[Path], None]] = {function.__name__: function for function in every}
    for part in parts:
        if part in functions:
            print(part, flush=True)  # a mutant may end the process
            place = directory / part  # what one part leaves is in no other's way
            place.mkdir()
            yield part, partial(functions[part], place)
            continue
        for name, record in recordings(directory):
            if part in ("crash", f"crash/{name}"):
                print(f"crash/{name}", flush=True)
                yield f"crash/{name}", partial(crash, record)
                if part != "crash":
                    break


def kinds() -> list[str]:
    """The kinds of crash states that notice the mutant alone; "nested": crashes of recoveries do."""
    directory = Path(tempfile.mkdtemp(prefix=f"pmstore-mutant-{os.getpid()}-", dir="/dev/shm"))
    out: set[str] = set()
    plans = [(kind, 0, frozenset({kind})) for kind in KINDS] + [("nested", 2, frozenset({"prefix"}))]
    try:
        for _, record in recordings(directory):
            recording = record()
            if recording is None:
                continue
            for name, depth, chosen in plans:
                options = Options(budget=KINDS_BUDGET, seed=1, depth=depth, kinds=chosen)
                if name not in out and explore(recording, options)[1] is not None:
                    out.add(name)
    except Exception:
        out.add("running")  # the workload itself fails
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return [kind for kind in (*KINDS, "nested", "running") if kind in out]


def main(arguments: list[str]) -> None:
    started = time.perf_counter()
    if arguments == ["--kinds"]:
        return print(json.dumps(kinds()))
    quick = arguments[:1] == ["--quick"]
    caught = run(tuple(arguments[quick:]) or PARTS, quick)
    print(
        json.dumps(
            {
                "caught": None if caught is None else caught._asdict(),
                "states": Evaluated.states,
                "seconds": round(time.perf_counter() - started, 2),
            }
        )
    )


def forked(mutant: str, output: str, *arguments: str) -> NoReturn:
    """Run the battery in this fork of a process that has imported it: with this mutant, and its output in a file."""
    from pmstore._mutant import choose  # type: ignore[import-not-found]  # a build with mutants has it

    os.setsid()
    small_files()
    for number, path in ((1, output), (2, os.devnull)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    choose(mutant)
    alone(arguments)


def alone(arguments: Sequence[str]) -> NoReturn:
    main(list(arguments))
    sys.stdout.flush()
    os._exit(0)  # a broken store may be unable to close


if __name__ == "__main__":
    alone(sys.argv[1:])
