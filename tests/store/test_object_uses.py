"""Values of registered types in all that is done with a store: readers, copies, crashes, archives, commands (I37)."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import pmstore
import pmstore.testing
from pmstore import _cli
from pmstore._catalog.catalog import Catalog
from pmstore._catalog.kinds import OBJECT
from pmstore._catalog.names import OBJECT_PREFIX, key_of
from pmstore._catalog.objects import head_of
from pmstore._core import Entry
from pmstore._resume.fingerprint import describe
from pmstore._store import hooks
from pmstore._values import registry
from pmstore._values.as_json import to_json
from pmstore._values.values import decode, encode
from tests.conftest import run_in_fork
from tests.core.test_damage import flipped
from tests.support.registered import Colour, Layer, Level, Model, Point, Slots, Way, cli, parts_in, sound, types  # noqa: F401

# ---- the rest of a store


def test_readers(open_store: Any) -> None:
    with open_store() as store:
        store["m"] = Model(np.arange(1000.0), 0.5)
        store.commit()
        with pmstore.open(store.path, "r") as reader:
            old = reader["m"]
            with store.transaction():
                store["m"].weights[:] = 7
                store["other"] = Model(np.arange(3), 1.0)
            assert old == Model(np.arange(1000.0), 0.5) and "other" not in reader
            copy, other = reader.read("m", "other")
            assert copy == Model(np.full(1000, 7.0), 0.5) and other == Model(np.arange(3), 1.0)
            store["m"] = Model(np.arange(5.0), 0.9)
            del store["other"]
            store.commit()
            assert copy == Model(np.full(1000, 7.0), 0.5)
            reader.wait(after=reader.sequence, timeout=20)
            reader.refresh()
            assert reader["m"] == Model(np.arange(5.0), 0.9) and list(reader) == ["m"]
            with pytest.raises(pmstore.ReadOnlyStoreError):
                reader["m"] = 5


def test_forks(open_store: Any) -> None:
    with open_store() as store:
        store["m"] = Model(np.arange(1000.0), 0.5)
        store.commit()

        def look() -> None:
            assert store["m"] == Model(np.arange(1000.0), 0.5)

        run_in_fork(look)


def test_backup_compact_salvage(open_store: Any, tmp_path: Path) -> None:
    with open_store() as store:
        store["big"] = np.zeros(1 << 16)
        store["m"], store["c"] = Model(np.arange(1000.0), 0.5), [Colour.RED]
        store.create_list("l").append(1)
        del store["big"]
        store.commit()
        store.backup(tmp_path / "backup.pm")
        path = store.path
    pmstore.compact(path)
    assert pmstore.salvage(path, tmp_path / "salvaged.pm").ok
    for copy in (path, tmp_path / "backup.pm", tmp_path / "salvaged.pm"):
        with pmstore.open(copy) as store:
            assert store["m"] == Model(np.arange(1000.0), 0.5) and store["c"] == [Colour.RED]
            sound(store, 3)
            store["again"] = Model(np.arange(2.0), 0.1)  # an id of its own
            store.create_list("l2").append(2)
            sound(store, 6)


def test_damage(open_store: Any, tmp_path: Path) -> None:
    data = np.random.default_rng(0).random(3000)
    with open_store() as store:
        store["m"], store["sound"] = Model(data, 0.5), Model(np.arange(3.0), 0.1)
        path = Path(store.path)
    flipped(path, data[600:700].tobytes())
    with pmstore.open(path, "r") as store:
        report = store.check()
        assert [problem.name for problem in report] == ["m[weights]"] and not report.ok
        assert store["sound"].rate == 0.1
    report = pmstore.salvage(path, tmp_path / "new.pm")
    assert "m" in {problem.name for problem in report}
    with pmstore.open(tmp_path / "new.pm") as store:
        assert list(store) == ["sound"] and store["sound"].rate == 0.1
        sound(store, 3)
    with pmstore.open(path) as store:
        store["m"] = Model(data, 0.6)  # what is damaged can be replaced
        store.commit()
        sound(store, 6)


def test_I37_the_check_finds_parts_that_are_out_of_place(store: Any) -> None:
    store["m"] = Model(np.arange(3000.0), 0.5)
    core = hooks.core_of(store)
    keys = [row.key for row in core.scan(OBJECT_PREFIX)]
    taken = core.get(keys[2])
    core.delete(keys[2])
    assert "lacks a part" in str(store.check())
    for look in (lambda: store["m"], lambda: store.parts("m"), lambda: store.copy("m", "n")):
        with pytest.raises(pmstore.CorruptStoreError, match="'m': .*lacks a part"):
            look()
    assert "damaged" in str(store) and list(store) == ["m"]
    core.put(keys[2], taken)
    assert store.check().ok
    core.put(keys[0][:9] + b"\0\0\0\3more", taken)
    assert "out of its place" in str(store.check())
    with pytest.raises(pmstore.CorruptStoreError):
        store["m"]
    del store["m"]
    sound(store, 0)
    core.put(keys[0], taken)  # of no object
    assert "out of its place (I37)" in str(store.check())
    assert len(store) == 0


@pytest.mark.parametrize(
    "meta",
    [b"", b"\x93", *map(msgpack.packb, ([1, 3], [0, 3, "M"], [1, -1, "M"], [1, 3, ""], [1.0, 3, "M"], [1, 3, b"M"]))],
)
def test_hostile_entries(store: Any, meta: bytes) -> None:
    hooks.core_of(store).put(key_of("m"), Entry(0, 0, OBJECT, 0, meta))
    with pytest.raises(pmstore.CorruptStoreError):
        store["m"]
    assert not store.check().ok and "damaged" in str(store)


@pytest.mark.parametrize("parts", [["Model"], [5, {}], ["Model", [1]], ["Model", {1: 2}], ["Model", {"a": 1}, 5]])
def test_hostile_values(parts: Any) -> None:
    with pytest.raises(pmstore.CorruptStoreError):
        decode(msgpack.packb(msgpack.ExtType(21, msgpack.packb(parts))))


def test_a_value_that_holds_itself() -> None:
    model = Model(None, 0.5)
    model.weights = model
    with pytest.raises((ValueError, RecursionError)):
        encode(model)


def consistent(store: Any) -> None:
    """Parts agree with each other, and with the counter."""
    if "m" in store:
        model = store["m"]
        assert (model.weights == model.rate).all() and len(model.weights) == 100 * store["n"]


@pmstore.testing.crash_test(check=consistent, budget=150)
def test_I37_crashes(store: Any) -> None:
    for n in (1, 2):
        with store.transaction():
            store["m"], store["n"] = Model(np.full(100 * n, float(n)), float(n)), n
        with store.transaction():
            model = store["m"]
            model.weights += 1
            model.rate += 1
            store["m"] = model
    with store.transaction():
        store.rename("m", "moved")
    with store.transaction():
        del store["moved"]


def test_lost_updates(store: Any) -> None:
    store["m"], store["l"] = Model(np.arange(3.0), 0.5), Layer([1, 2])
    store.commit()
    model, layer = store["m"], store["l"]
    model.weights += 1  # live
    store.commit()
    model.rate = 0.6
    with pytest.warns(pmstore.LostUpdateWarning, match="'m' was read"):
        store.commit()
    store["m"] = model
    model = store["m"]
    model.rate = 0.7
    store["m"] = model
    store.commit()
    layer.weights.append(3)
    with pytest.warns(pmstore.LostUpdateWarning, match="'l' was read"):
        store.commit()


def test_names_with_changes_are_counted(open_store: Any) -> None:
    store = open_store()
    store["m"] = Model(np.arange(3000.0), 0.5)
    from pmstore._store.lost_work import count_names

    assert count_names(store._catalog) == 1
    store.commit()
    store["m"].weights[0] = 5
    assert count_names(store._catalog) == 1
    store.rollback()


def test_archive(open_store: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("numcodecs")
    with open_store() as store:
        store["m"], store["same"] = Model(np.arange(3000.0), 0.5), Model(np.arange(3.0), 0.1)
        drain = store.drain(tmp_path / "archive")
        store.commit()
        drain.wait()
        first = store.sequence
        store["m"].weights[5] = 9
        store["same"] = store["same"]
        store.commit()
        drain.wait()
        last = store.sequence
    archive = pmstore.archive.open(tmp_path / "archive")
    assert archive[first]["m"] == Model(np.arange(3000.0), 0.5)
    assert archive[last]["m"].weights[5] == 9 and archive[last].parts("same")["rate"] == 0.1
    assert {name: one.kind for name, one in archive.diff(first, last).items()} == {"m": "changed"}
    archive.restore(tmp_path / "restored.pm", first)
    with pmstore.open(tmp_path / "restored.pm") as store:
        assert store["m"] == Model(np.arange(3000.0), 0.5)
        sound(store, 6)


@pytest.mark.long_on("memory")
def test_the_command_line(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store["g/m"], store["c"] = Model(np.arange(1000.0), 0.5), [Colour.RED]
    store["evil"] = pmstore.Parts("a\x1b[31m", {"\x1b[2J": np.arange(2)})
    store.commit()

    def run(*arguments: str) -> str:
        assert _cli.main([*arguments[:1], str(store.path), *arguments[1:]]) == 0
        return capsys.readouterr().out

    assert "Model = weights (1000,) float64 7.8 KiB, rate 9 B" in run("ls", "-l")
    assert "Model" in run("ls", "-l") and "\x1b" not in run("ls", "-l")
    assert "1 object" in run("info") or "2 objects" in run("info")
    code, out = cli("dump", store.path, "g/m")
    assert code == 0 and "<Parts of a Model {'weights': (1000,) float64, 'rate': 0.5" in out
    code, out = cli("dump", "--json", store.path, "c", "g/m")
    assert code == 0
    shown = json.loads(out)
    assert shown["c"] == [{"type": "tests.support.registered.Colour", "parts": {"name": "RED"}}]
    assert shown["g/m"]["type"] == "Model" and shown["g/m"]["parts"]["weights"][:3] == [0, 1, 2]
    code, out = cli("check", store.path)
    assert code == 0


def test_the_tree(store: Any) -> None:
    store["m"] = Model(np.arange(1000.0), 0.5)
    assert "Model = weights (1000,) float64 7.8 KiB, rate 9 B, history" in str(store)
    assert "Model" in store._repr_html_() and "7.8 KiB" in store._repr_html_()


def test_exports(store: Any, tmp_path: Path) -> None:
    """An object is exported as a group of its parts, and comes back as that."""
    store["m"], store["c"], store["x"] = Model(np.arange(1000.0), 0.5), Colour.RED, np.arange(3)
    store.attrs("m")["units"] = "m"
    assert pmstore.export(store, tmp_path / "out.npz") == 5
    with np.load(tmp_path / "out.npz") as found:
        assert found["m/weights"].tolist() == list(range(1000)) and found["x"].tolist() == [0, 1, 2]
        values = json.loads(found["__values__.json"])
    assert (values["m/rate"], values["m/history"]) == (0.5, [1, {"loss": 0.5}])
    assert values["c"]["parts"] == {"name": "RED"}
    with pmstore.open(":memory:") as other:
        pmstore.load_into(other, tmp_path / "out.npz")
        assert other["c"] is Colour.RED
        assert other["m/weights"].tolist() == list(range(1000))
        assert dict(other.attrs("m")) == {"type": "Model", "units": "m"}


def test_exports_of_names_that_mean_something(store: Any, tmp_path: Path) -> None:
    """An attribute that is named type, and parts whose names are no paths, or those of other parts."""
    names = ["a/b", "part 0", "..", "part 2", "part 2_", "w"]
    store["o"] = pmstore.Parts("tests.T", {name: np.array([i]) for i, name in enumerate(names)})
    store.attrs("o").update(type="mine", type_=5)
    assert pmstore.export(store, tmp_path / "out.npz") == 6
    with pmstore.open(":memory:") as other:
        pmstore.load_into(other, tmp_path / "out.npz")
        shown = ["part 0_", "part 0", "part 2__", "part 2", "part 2_", "w"]
        assert {name: array.tolist() for name, array in other.items()} == {f"o/{n}": [i] for i, n in enumerate(shown)}
        assert dict(other.attrs("o")) == {"type": "mine", "type_": 5, "type__": "tests.T"}


def test_an_export_reads_each_part_alone(open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store:
        store["o"] = pmstore.Parts("tests.T", {str(i): np.arange(3) for i in range(50)})
    value, count = Catalog.value, 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return value(*arguments)

    monkeypatch.setattr(Catalog, "value", counted)
    with open_store(mode="r") as reader:
        assert pmstore.export(reader, tmp_path / "out.npz") == 50
    assert count <= 2 * 50


def test_json_and_fingerprints() -> None:
    assert to_json(Point(1, Colour.RED)) == {
        "type": "tests.support.registered.Point",
        "parts": {"x": 1, "y": {"type": "tests.support.registered.Colour", "parts": {"name": "RED"}}},
    }
    assert describe(Colour.RED) != describe(Colour.GREEN)
    assert describe(Model(np.arange(3), 0.5)) == describe(Model(np.arange(3), 0.5)) != describe(Model(np.arange(3), 1))


def test_nothing_optional_is_imported() -> None:
    code = "import sys, pmstore; print([m for m in sys.modules if m.split('.')[0] in ('pandas', 'scipy', 'polars')])"
    code += "; print('numpy.ma' in sys.modules, 'pyarrow' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == ["[]", "False False"]


def test_reading_imports_nothing(store: Any) -> None:
    """A frame in a program without pandas."""
    store["f"] = pmstore.Parts("pandas.DataFrame", {"about": {}, "0 x": np.arange(20)})
    store["a"] = pmstore.Parts("scipy.sparse.csr_array", {"data": np.arange(3)})
    store.commit()
    code = (
        "import sys, pmstore; s = pmstore.open(sys.argv[1], 'r'); print(s['f'], s['a'], s)\n"
        "print(any(m in sys.modules for m in ('pandas', 'scipy')))"
    )
    out = subprocess.run([sys.executable, "-c", code, store.path], capture_output=True, text=True, check=True).stdout
    assert "after 'import pandas' it reads as one" in out and "after 'import scipy.sparse' it" in out
    assert out.endswith("False\n")


def test_ids_are_not_used_again(store: Any) -> None:
    store["a"] = Model(np.arange(3.0), 0.5)
    before = head_of(hooks.core_of(store).get(key_of("a"))).id
    store.rollback()
    store["a"] = Model(np.arange(3.0), 0.5)
    store.create_list("l")
    assert head_of(hooks.core_of(store).get(key_of("a"))).id > before
    sound(store, 3)


class Rounded:
    """A type whose `decode` does not give the parts back as they are."""

    encoded = 0

    def __init__(self, weights: Any, rate: float) -> None:
        self.weights, self.rate, self.history = weights, round(rate, 1), "x" * 5000

    @staticmethod
    def encode(value: Rounded) -> Any:
        Rounded.encoded += 1
        return {"rate": value.rate, "weights": value.weights, "history": value.history}


@pytest.mark.parametrize("as_parts", [False, True])
def test_reading_an_object_does_not_encode_it(store: Any, monkeypatch: pytest.MonkeyPatch, as_parts: bool) -> None:
    """Lists in it may be large. Each check is against the stored parts, or against those of another copy."""
    monkeypatch.setattr(registry, "_BY_TYPE", dict(registry._BY_TYPE))
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))
    pmstore.register(Rounded, Rounded.encode, lambda parts: Rounded(parts["weights"], parts["rate"]), name="Rounded")
    parts = {"weights": np.arange(9.0), "rate": 0.55}
    store["m"] = pmstore.Parts("Rounded", parts) if as_parts else Rounded(**parts)
    store.commit()
    Rounded.encoded = 0
    value = store["m"]
    assert value.rate == 0.6 and Rounded.encoded == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            store.commit()
    assert Rounded.encoded
    value.rate = 7.5
    with pytest.warns(pmstore.LostUpdateWarning, match="'m' was read from the store and changed"):
        for _ in range(8):
            store.commit()
    value = store["m"]
    value.rate = 8.5
    store["m"] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.commit()
    assert store["m"].rate == 8.5


def test_copies_of_large_objects_are_forgotten(store: Any) -> None:
    store["m"] = Layer(np.arange(9.0), "x" * 500_000)
    found = []
    for _ in range(20):
        found.append(weakref.ref(store["m"]))
    assert sum(one() is not None for one in found) <= 3


@pytest.mark.parametrize("name, package, extra", [("torch", "torch", "torch"), ("codecs", "numcodecs", "archive")])
def test_a_module_whose_package_is_missing_is_no_attribute(name: str, package: str, extra: str) -> None:
    """hasattr and help ask for all names. An import names the package."""
    program = f"""
import inspect, sys
sys.modules["{package}"] = None
import pmstore
assert not hasattr(pmstore, "{name}") and "{name}" not in dict(inspect.getmembers(pmstore))
try:
    import pmstore.{name}
except ModuleNotFoundError as error:
    print(error)
try:
    pmstore.{name}
except AttributeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.count(f"pmstore.{name} needs {package}: pip install 'pmstore[{extra}]'") == 2
