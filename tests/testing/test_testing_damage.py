"""pmstore.testing: damage at rest, in every sector and of every kind, is never passed over, and what must be noticed.

PMSTORE_DAMAGE says how many cases of each kind of file are tried; "all" for all.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore.testing import CrashExplorer, CrashFailure, CrashTestError
from pmstore.testing._base import session
from pmstore.testing._faults import damage as module
from pmstore.testing._faults.damage import KINDS, PAGE, SECTOR, Damage, explore_damage
from tests.conftest import Medium
from tests.support.pairs import MEDIA, half

CASES = os.environ.get("PMSTORE_DAMAGE", "250")
BUDGET = None if CASES == "all" else int(CASES)


@pytest.fixture(autouse=True)
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for damaged files that were passed over."""
    monkeypatch.setattr(session, "directory", lambda: tmp_path / "failures")
    return tmp_path / "failures"


def fill(store: pmstore.Store) -> None:
    rng = np.random.default_rng(7)
    store["large"] = rng.random(9000)
    store["small"] = rng.random(5)
    store["model/weights"] = rng.random((60, 70)).astype("f4")
    store["model/config"] = {"name": "net", "sizes": [1, 2, 3]}
    store["text"] = "y" * 9000
    store.create_list("history").extend(range(40))
    for i in range(100):
        store[f"many/{i:03}"] = i


def made(path: Path, medium: str, closed: bool) -> tuple[bytes, bytes]:
    """A store's file, and an earlier version of it."""
    with pmstore.open(path, "x", media=medium) as store:
        fill(store)
    older = path.read_bytes()
    store = pmstore.open(path, "r+", media=medium)
    for i in range(4):
        store["large"][i * 2000] = i
        store["many/003"] = -i
        store["new"] = np.full(2000, float(i))
        store.commit()
    store.close() if closed else store._drop(discard=True)
    return path.read_bytes(), older


# ---- the core


@pytest.mark.parametrize(
    "medium, closed",
    half(MEDIA, [pytest.param(True, id="closed"), pytest.param(False, id="killed")]),
    indirect=["medium"],
)
def test_damage_is_found_or_harmless(medium: Medium, closed: bool) -> None:
    image, _ = made(medium.directory / "store.pm", medium.name, closed)
    made(medium.directory / "other.pm", medium.name, True)
    other = (medium.directory / "other.pm").read_bytes()  # of another store, with another id: its sectors are strange
    report = explore_damage(image, medium=medium.name, budget=BUDGET, older=other)
    assert set(report.by_kind) >= set(KINDS) - {"longer"}  # of which there are only a few
    assert set(report.outcomes) == {"not opened", "reported", "harmless"}
    assert min(report.outcomes.values()) > report.evaluated // 20


def test_a_lost_write_is_found(medium: Medium) -> None:
    """A sector or page that is as it was one run before."""
    image, older = made(medium.directory / "store.pm", medium.name, True)
    report = explore_damage(image, medium=medium.name, older=older, kinds=["stale"])
    assert report.exhaustive and report.evaluated > 40


# ---- kinds of damage


IMAGE = random.Random(1).randbytes(8192)  # two pages
OLDER = bytes(8192)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (Damage("flip", 600, 3), "bit 3 of byte 600 was flipped"),
        (Damage("zeros", 512), "the sector at byte 512 was zeros"),
        (Damage("noise", 4096, 0, PAGE, 7), "the page at byte 4096 was noise"),
        (Damage("stale", 512), "the sector at byte 512 was that of an older version of the file"),
        (Damage("misread", 512, 1024 + 8), "the sector at byte 512 was read from byte 1032 of the file"),
        (Damage("miswritten", 512, 1024 + 8), "the sector at byte 512 was written over that at byte 1032"),
        (Damage("cut", 700), "the file was cut to 700 bytes"),
        (Damage("longer", 8192, 3), "the file had 3 bytes more at its end"),
    ],
    ids=lambda value: value.kind if isinstance(value, Damage) else "",
)
def test_a_piece_of_damage(damage: Damage, text: str) -> None:
    assert str(damage).startswith(text)
    damaged = damage.apply(IMAGE, OLDER)
    assert damaged != IMAGE
    assert damaged == damage.apply(IMAGE, OLDER)
    length = {"cut": 700, "longer": 8195}.get(damage.kind, len(IMAGE))
    assert len(damaged) == length
    different = [i for i in range(min(length, len(IMAGE))) if damaged[i] != IMAGE[i]]
    start = damage.detail if damage.kind == "miswritten" else damage.at
    size = 1 if damage.kind == "flip" else damage.size
    assert all(start <= i < start + size for i in different)


def test_every_sector_has_every_kind() -> None:
    cases = module.cases(IMAGE, OLDER, 1)
    assert {case.kind for case in cases} == set(KINDS)
    flips = {case.at // SECTOR for case in cases if case.kind == "flip"}
    assert flips == set(range(len(IMAGE) // SECTOR))
    assert cases == module.cases(IMAGE, OLDER, 1) != module.cases(IMAGE, OLDER, 2)


# ---- what it notices


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.pm"
    with pmstore.open(path, media="file") as store:
        store["x"] = np.arange(2000.0)
        store["name"] = "value"
    return path


class Blind:
    """A check that finds nothing."""

    ok = True


def test_damage_that_nobody_notices(small: Path, failures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmstore.Store, "check", lambda self: Blind())
    with pytest.raises(CrashFailure) as caught:
        explore_damage(small, medium="file")
    text = str(caught.value)
    assert "which was not noticed: the store opened and check() found nothing, but it is at commit" in text
    assert "array 'x'" in text
    damaged = Path(str(caught.value.path))
    assert damaged.parent == failures and damaged.read_bytes() != small.read_bytes()
    damage = eval(text.partition("only=")[2], {"Damage": Damage})
    with pytest.raises(CrashFailure, match="not noticed"):
        explore_damage(small, medium="file", only=damage)
    monkeypatch.undo()
    report = explore_damage(small, medium="file", only=damage)
    assert report.evaluated == 1 and report.outcomes["harmless"] == 0


class Later:
    """A check that passes on the undamaged store, which it sees first. Each process of a test sees that it was
    called."""

    def __init__(self, directory: Path, act: Callable[[], object]) -> None:
        self._called = directory / "called"
        self._act = act

    def __call__(self, store: pmstore.Store) -> None:
        if self._called.exists():
            self._act()
        self._called.touch()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    while True:
        time.sleep(60)  # the alarm ends it


def refuse() -> None:
    raise AssertionError("there is no y")


def test_a_process_that_dies_of_it(small: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashFailure, match="the process that opened it ended with SIGKILL"):
        explore_damage(small, Later(tmp_path, die), medium="file", budget=200)


def test_a_process_that_hangs(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 1)
    with pytest.raises(CrashFailure, match="did not come to an end within 1 s"):
        explore_damage(small, Later(tmp_path, hang), medium="file", budget=200)


def test_an_exception_that_is_none_of_ours(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: pmstore.Store) -> Any:
        if os.getpid() != owner:
            raise IndexError("list index out of range")
        return real(self)

    owner, real = os.getpid(), pmstore.Store.check
    monkeypatch.setattr(pmstore.Store, "check", check)
    with pytest.raises(CrashFailure, match="the store raised IndexError, which is no pmstore.Error"):
        explore_damage(small, medium="file", budget=100)


def test_the_check_is_asked(small: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashFailure, match="not noticed: there is no y"):
        explore_damage(small, Later(tmp_path, refuse), medium="file", budget=200)


def test_the_explorer_tries_one_case_again(small: Path, tmp_path: Path) -> None:
    with CrashExplorer("again") as explorer:
        with pytest.raises(CrashFailure, match="again: the same call, with only=") as caught:
            explorer.damage(small, Later(tmp_path, refuse))
        damage = eval(str(caught.value).partition("only=")[2], {"Damage": Damage})
        with pytest.raises(CrashFailure, match=re.escape(str(damage))):
            explorer.damage(small, Later(tmp_path / "failures", refuse), only=damage)
        assert explorer.damage(small, only=damage).evaluated == 1


@pytest.mark.parametrize("only", [None, Damage("flip", 600, 3)])
@pytest.mark.parametrize(
    ("act", "text"),
    [
        (refuse, "fails without any damage, on the undamaged store: .*no damage was tried. It said: there is no y"),
        (die, "no damage was tried. During the check, the process that opened it ended with SIGKILL"),
        (lambda: pytest.fail("not so"), "fails without any damage, .*not so"),
    ],
)
def test_a_check_that_always_fails_is_no_damage(
    small: Path, failures: Path, act: Callable[[], object], text: str, only: Damage | None
) -> None:
    seen: list[int] = []

    def check(store: pmstore.Store) -> None:
        act()

    with pytest.raises(CrashTestError, match=text):
        explore_damage(small, check, medium="file", only=only, progress=lambda done, total: seen.append(done))
    assert not seen and not failures.exists()


def test_a_check_that_returns_false_is_reported_in_its_own_words(small: Path) -> None:
    with pytest.raises(CrashTestError, match="^the check .* returned False: it has to raise"):
        explore_damage(small, lambda store: False, medium="file", budget=200)


class OfTwo(CrashTestError):
    """An error that pickle can't make anew."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def test_an_error_of_the_check_s_own_kind_is_told_in_its_words(small: Path) -> None:
    def check(store: pmstore.Store) -> None:
        raise OfTwo("no reference", "the disk is not there")

    with pytest.raises(CrashTestError, match="^no reference: the disk is not there$"):
        explore_damage(small, check, medium="file", budget=3)


def test_the_check_of_the_undamaged_store_is_no_case(small: Path) -> None:
    seen: list[tuple[int, int]] = []

    def check(store: pmstore.Store) -> None:
        assert store["name"] == "value"

    report = explore_damage(
        small, check, medium="file", budget=20, progress=lambda done, total: seen.append((done, total))
    )
    assert report.evaluated == sum(report.outcomes.values()) == 20
    assert seen == [(done, 20) for done in range(20)]


def test_a_state_that_may_be_lost(tmp_path: Path) -> None:
    """The last commit in a log is torn: it may not have got there, if the caller says that it may."""
    path = tmp_path / "log.pm"
    store = pmstore.open(path, media="file")
    store["x"] = 1
    store.commit()
    states = {store.sequence: store._catalog.core.state_hash()}
    place = store.stats().log_used
    store["x"] = 2
    store.commit()
    store._drop(discard=True)
    image = bytearray(path.read_bytes())
    record = image.rfind(b"PMRC") if b"PMRC" in image else len(image) - store_log(image) + place
    marker = bytes(16)
    image[2048 : 2048 + 16] = marker  # what tells that it was durable is not durable itself
    damage = Damage("zeros", record)
    with pytest.raises(CrashFailure, match="it is at commit 1 instead of 2"):
        explore_damage(bytes(image), medium="file", only=damage)
    assert explore_damage(bytes(image), medium="file", only=damage, states=states).outcomes == {"harmless": 1}


def store_log(image: bytes | bytearray) -> int:
    """The size of its log, which ends the file."""
    return int.from_bytes(image[64:72], "little")


# ---- what can't be tried


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": 0}, "a budget of 0 tries nothing"),
        ({"medium": "tape"}, 'medium is "memory" or "file", not \'tape\''),
        ({"check": "check"}, "check is a function"),
        ({"kinds": ["burnt"]}, "kinds is any of flip, .*, not .'burnt'."),
        *(
            (
                {"only": only},
                rf"only is damage within the \d+ bytes of the file, such as .*Damage.*, not {re.escape(text)}",
            )
            for only, text in (
                ("flip", "'flip'"),
                (tuple(Damage("flip", 600, 3)), "('flip', 600"),
                (Damage("burnt", 600), "Damage(kind='burnt'"),
                (Damage("flip", 1 << 40, 3), "Damage(kind='flip', at=1099511627776"),
                (Damage("flip", 600, 8), "Damage(kind='flip', at=600, detail=8"),
                (Damage("zeros", -1), "Damage(kind='zeros', at=-1"),
                (Damage("cut", 1.5), "Damage(kind='cut', at=1.5"),  # type: ignore[arg-type]
                (Damage("miswritten", 512, 1 << 40), "Damage(kind='miswritten', at=512, detail=1099511627776"),
            )
        ),
    ],
)
def test_bad_options(small: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CrashTestError, match=text):
        explore_damage(small, **{"medium": "file", **options})


def test_files_that_are_no_sound_stores(small: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashTestError, match="no store that could be damaged"):
        explore_damage(b"what is this" * 1000, medium="file")
    with pytest.raises(CrashTestError, match=r"missing\.pm can't be read: No such file"):
        explore_damage(tmp_path / "missing.pm", medium="file")
    image = bytearray(small.read_bytes())
    at = image.find(np.arange(2000.0)[900:910].tobytes())
    image[at] ^= 1
    with pytest.raises(CrashTestError, match="damaged before anything was done to it"):
        explore_damage(bytes(image), medium="file")
