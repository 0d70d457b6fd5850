"""Attributes of stores, groups and names: a mapping beside each, part of everything that happens to it."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from pmstore._catalog.attributes import ATTRIBUTES_MAX
from pmstore._catalog.names import ATTRIBUTES_PREFIX, attributes_key
from pmstore._core import Entry
from tests.support.crashes import BUDGET, assert_survives, record
from tests.support.crashes_async import ASYNC
from tests.support.derivations import doubled

Open = Callable[..., pmstore.Store]
Seen = dict[str, dict[str, Any]]
one_medium = pytest.mark.parametrize("medium", ["memory"], indirect=True)

VALUES: dict[str, Any] = {
    "units": "K",
    "dims": ["y", "x"],
    "scale": np.float32(0.5),
    "offset": 1 << 70,
    "pair": (1, 2.5),
    "none": None,
    "raw": b"\0x",
    "a/b": {"c": [None]},
    "ünï": True,
}


def fill(store: pmstore.Store) -> None:
    store["g/w"] = np.arange(12.0).reshape(3, 4)
    store["g/deep/e"] = 3
    store["x"] = b"long" * 2000
    store.create_list("g/l").extend([1, 2])
    for name in ("", "g", "g/w", "g/deep", "g/deep/e", "x", "g/l"):
        store.attrs(name)["of"] = name


def seen(store: Any) -> Seen:
    """All attributes of all that has some."""
    groups = {name.rpartition("/")[0] for name in store}
    groups |= {group.rpartition("/")[0] for group in groups} | {""}
    found = {name: dict(store.attrs(name)) for name in {*store, *groups}}
    return {name: about for name, about in found.items() if about}


def entries(store: pmstore.Store) -> list[bytes]:
    return [row.key for row in store._catalog.core.scan(ATTRIBUTES_PREFIX)]


def test_a_mapping_of_values(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        names, count = list(store), len(store)
        about = store.attrs("g/w")
        about.update(VALUES)
        assert dict(about) == {"of": "g/w", **VALUES}
        about["array"] = np.arange(3, dtype=">i2")
        assert all(type(about[name]) is type(value) for name, value in VALUES.items())
        assert about["array"].dtype == ">i2" and "units" in about and "unit" not in about and len(about) == 11
        assert about.pop("none") is None and about.pop("none", 7) == 7
        del about["raw"]
        assert about.setdefault("units", "m") == "K" and list(about)[:2] == ["of", "units"]
        assert list(store) == names and len(store) == count and len(store.group("g")) == count - 1
        assert store.group("g").attrs("w").name == "g/w" and store.group("g").attrs().name == "g"
        assert store.group("g").group("deep").attrs("e")["of"] == "g/deep/e"
        about.clear()
        assert not about and about == {}
    with open_store(verify=True) as store:
        assert seen(store) == {name: {"of": name} for name in ("", "g", "g/deep", "g/deep/e", "x", "g/l")}
        assert store.check().ok and "of" in repr(store.attrs()) and repr(store.attrs("x")).startswith("<attributes of")


class Broken:
    """A registered type whose `decode` fails."""


def _fails(parts: dict[str, Any]) -> Any:
    raise ZeroDivisionError("no")


pmstore.register(Broken, lambda value: {"b": 1}, _fails, name="tests.Broken")


def test_a_value_that_can_not_be_decoded(open_store: Open, tmp_path: Path) -> None:
    """It concerns those who read this very value."""
    with open_store() as store:
        store["g/a"] = np.arange(3)
        about = store.attrs("g/a")
        about.update(units="K", bad=Broken(), nested=[1, Broken()])
        store.commit()
        assert about["units"] == "K" and list(about) == ["units", "bad", "nested"] and len(about) == 3
        assert "bad" in about and "Parts of a tests.Broken" in repr(about) and "units" in str(store)
        for read in (lambda: about["bad"], lambda: about["nested"], lambda: about.pop("bad"), lambda: dict(about)):
            with pytest.raises(pmstore.DecodeError):
                read()
        about["units"] = "m"
        assert about.pop("units") == "m" and store.check().ok
        store.commit()
        store.backup(tmp_path / "backup.pm")
        store.copy("g", "h")
        store.rename("h", "i")
        assert pmstore.export(store, tmp_path / "x.npz") == 2
        path = store.path
    pmstore.compact(path)
    assert pmstore.salvage(path, tmp_path / "salvaged.pm").ok
    for one in (path, tmp_path / "backup.pm", tmp_path / "salvaged.pm"):
        with pmstore.open(one, verify=True) as store:
            assert list(store.attrs("g/a")) == ["bad", "nested"]
            del store.attrs("g/a")["bad"]
            assert list(store.attrs("g/a")) == ["nested"]


def test_an_attribute_named_self(open_store: Open) -> None:
    with open_store() as store:
        store.attrs().update({"other": 2}, self=1)
        assert dict(store.attrs()) == {"other": 2, "self": 1}


def test_names_of_numpy_are_plain_text(open_store: Open) -> None:
    with open_store() as store:
        store["x"] = 1
        attributes = store.attrs("x")
        attributes["source"] = "here"
        for name in np.array(["units", "source", "other"]):
            attributes[name] = "K"
        attributes.setdefault(np.str_("last"), 1)
        del attributes[np.str_("other")]
        store.commit()
        assert {name: type(name) for name in attributes} == dict.fromkeys(["source", "units", "last"], str)
        assert store.check().ok and attributes == {"source": "K", "units": "K", "last": 1}


def test_a_transaction_takes_them_back(open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.commit()
    before = seen(store)
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.attrs("g/w")["of"] = "other"
        store.attrs()["new"] = 1
        store.rename("g", "h")
        store.copy("x", "y")
        del store["h/w"]
        store.clear()
        raise ZeroDivisionError
    assert seen(store) == before and store.check().ok
    with store.transaction():
        store.attrs("g/w")["big"] = "b" * 5000  # an extent of its own
    store.attrs("g/w")["big"] = "c" * 5000
    store.rollback()
    assert store.attrs("g/w")["big"] == "b" * 5000
    with store.transaction(only=[]):
        store.attrs("g/w")["big"] = "d" * 5000
    store.close()
    with open_store(verify=True) as store:
        assert store.attrs("g/w")["big"] == "d" * 5000


def test_I38_they_follow_and_go(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        before = seen(store)
        store.rename("g", "h/k")
        moved = {name.replace("g", "h/k", 1) if name[:1] == "g" else name: value for name, value in before.items()}
        assert seen(store) == moved
        store.copy("h/k", "c")
        copied = {name.replace("g", "c", 1): value for name, value in before.items() if name[:1] == "g"}
        assert seen(store) == {**moved, **copied}
        store.attrs("c/w")["of"] = "changed"
        assert store.attrs("h/k/w")["of"] == "g/w"
        store.attrs("h")["here"] = 1
        store.rename("h/k", "g")  # the group h is gone with its last names
        assert "h" not in {key[1:-1].decode() for key in entries(store)}
        store.rename("x", "y")
        assert store.attrs("y")["of"] == "x"
        for change in (lambda: store.pop("g/l"), lambda: store.__delitem__("g/deep/e")):
            change()
        assert {"g/l", "g/deep", "g/deep/e"}.isdisjoint(seen(store)) and store.attrs("g")["of"] == "g"
        store["g/l"] = store["g/deep/e"] = 1
        assert not store.attrs("g/l") and not store.attrs("g/deep") and not store.attrs("g/deep/e")
        store.group("g").clear()
        store.group("c").clear()
        assert {key[1:-1].decode() for key in entries(store)} == {"", "y"}
        store.clear()
        assert seen(store) == {"": {"of": ""}} and entries(store) == [attributes_key("")]  # the store is still there
        assert store.check().ok


def test_another_value_keeps_them(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        store["g/w"] = np.zeros(5)
        store["g/w"] = "text"
        store["g/l"] = 5
        assert store.attrs("g/w")["of"] == "g/w" and store.attrs("g/l")["of"] == "g/l" and store.check().ok


def test_of_derived_arrays(open_store: Open) -> None:
    with open_store() as store:
        store["f"] = np.ones(4)
        store.derive("g/d", doubled, "f", policy="store")
        store.attrs("g/d")["units"] = "m"
        store.attrs("g")["of"] = "g"
        assert store["g/d"].sum() == 8
        store.derive("g/d", doubled, "f", version=2, replace=True)
        store.rename("g", "h")
        store.copy("h/d", "e")
        assert store.attrs("h/d")["units"] == store.attrs("e")["units"] == "m" and store.attrs("h")["of"] == "g"
        del store["h/d"]
        assert [key[1:-1] for key in entries(store)] == [b"e"] and store.check().ok


def test_readers_see_those_of_their_commit(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        store.commit()
        before = seen(store)
        with pmstore.open(store.path, "r") as reader:
            store.attrs("g/w")["of"] = "new"
            assert seen(reader) == before
            store.commit()
            assert seen(reader) == before
            reader.refresh()
            assert seen(reader) == seen(store) != before
            with pytest.raises(pmstore.ReadOnlyStoreError):
                reader.attrs("g/w")["of"] = 1
            with pytest.raises(pmstore.ReadOnlyStoreError):
                reader.attrs("g/w").clear()


def test_backup_compact_and_salvage(open_store: Open, tmp_path: Path) -> None:
    with open_store() as store:
        fill(store)
        store.attrs("x")["long"] = list(range(3000))
        store["gone"] = np.ones(200_000)
        store.commit()
        del store["gone"]
        store.commit()
        before = seen(store)
        store.backup(tmp_path / "copy.pm")
    assert pmstore.compact(store.path) > 0 and pmstore.salvage(store.path, tmp_path / "rescued.pm").ok
    for path in (store.path, tmp_path / "copy.pm", tmp_path / "rescued.pm"):
        with pmstore.open(path, "r", verify=True) as store:
            assert seen(store) == before and len(store) == 4


@one_medium
def test_damaged_attributes(open_store: Open, tmp_path: Path) -> None:
    """What they describe is sound: it is read, and salvaged without them."""
    with open_store() as store:
        fill(store)
        store.attrs("x")["long"] = "find me" * 1000
        store.commit()
        core = store._catalog.core
        core.put(attributes_key("g/w"), Entry(0, 0, 2, 0, b"\xc1"))
        core.put(attributes_key("g"), Entry(0, 0, 2, 0, b"\x91\x01"))  # a list
        core.put(attributes_key("nothing"), Entry(0, 0, 2, 0, b"\x81\xa1a\x01"))
    data = Path(store.path).read_bytes()
    Path(store.path).write_bytes(data.replace(b"find me", b"find us"))
    with open_store(mode="r") as store:
        for name in ("x", "g", "g/w"):
            with pytest.raises(pmstore.CorruptStoreError, match="the attributes of"):
                dict(store.attrs(name))
        assert store["g/w"].sum() == 66 and "unreadable attributes" in str(store)
        report = store.check()
        text = str(report)
        assert len(report) == 4 and all(f"the attributes of '{name}'" in text for name in ("x", "g", "g/w", "nothing"))
        assert all(problem.name is None for problem in report)
    report = pmstore.salvage(store.path, tmp_path / "rescued.pm")
    assert len(report) == 4
    with pmstore.open(tmp_path / "rescued.pm", verify=True) as store:
        assert seen(store) == {name: {"of": name} for name in ("", "g/deep", "g/deep/e", "g/l")}
        assert store["x"] == b"long" * 2000 and store["g/w"].sum() == 66 and store.check().ok
    with open_store() as store:  # they can be replaced as a whole, and deleted with the name
        store.attrs("g/w").clear()
        del store["x"]
        assert not store.attrs("g/w")


def test_refused(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        about, before = store.attrs("x"), seen(store)
        for name in ("none", "g/none", "g/w/below"):
            with pytest.raises(pmstore.UnknownNameError):
                store.attrs(name)
        with pytest.raises(pmstore.UnknownNameError, match="no attribute 'unit'.*'x' has 'of'"):
            about["unit"]
        for call in (lambda: about.pop("unit"), lambda: about.__delitem__("unit")):
            with pytest.raises(KeyError):
                call()
        for name, error in (
            ("", pmstore.InvalidNameError),
            ("a\0", ValueError),
            ("\ud800", ValueError),
            (5, TypeError),
        ):
            with pytest.raises(error):
                about[name] = 1  # type: ignore[index]
        for name in ("/x", "a//b"):
            with pytest.raises(pmstore.InvalidNameError):
                store.attrs(name)
        with pytest.raises(TypeError, match="a store can't keep"):
            about.update(good=1, bad=object())
        with pytest.raises(pmstore.TooLargeError, match="the attributes of 'x' would take"):
            about["large"] = bytes(ATTRIBUTES_MAX)
        assert seen(store) == before and 5 not in about
        del store["x"]
        for use in (lambda: dict(about), lambda: about.update(a=1), lambda: len(about), about.clear):
            with pytest.raises(pmstore.UnknownNameError):
                use()
        assert "no name 'x'" in repr(about) and store.check().ok
        about = store.attrs("g/w")
    with pytest.raises(pmstore.ClosedStoreError):
        about["of"]
    with pytest.raises(pmstore.ClosedStoreError):
        store.attrs()


def test_those_of_a_store_and_of_a_group_as_in_h5py(open_store: Open) -> None:
    with open_store(mode="x") as store:
        store["model/w"] = 1
        store.attrs["title"] = "a run"
        model = store.group("model")
        model.attrs["units"] = "K"
        model.attrs("w").update(of="w")
        assert store.attrs == {"title": "a run"} and store.attrs("model") == model.attrs == {"units": "K"}
        assert store.attrs("model/w") == {"of": "w"} and "title" in store.attrs and len(model.attrs) == 1
        assert repr(model.attrs) == "<attributes of 'model': {'units': 'K'}>" and model.attrs().name == "model"
        nothing = store.group("nothing")
        assert hasattr(nothing, "attrs") and "no name 'nothing'" in repr(nothing.attrs)
        for use in (lambda: nothing.attrs["units"], nothing.attrs, lambda: store.attrs("model/v")):
            with pytest.raises(pmstore.UnknownNameError):
                use()
        with pytest.raises(pmstore.InvalidNameError):
            store.attrs("/")
    assert hasattr(store, "attrs")
    for use in (store.attrs, lambda: store.attrs["title"], lambda: len(model.attrs)):
        with pytest.raises(pmstore.ClosedStoreError):
            use()


def test_without_space_nothing_changes(open_store: Open) -> None:
    with open_store(mode="x", max_size=2 << 20) as store:
        store["x"] = 1
        store.attrs("x")["of"] = "x"
        store.commit()
        with pytest.raises(pmstore.OutOfSpaceError):
            for i in range(100):
                store[f"{i}"] = 1
                store.attrs(f"{i}")["large"] = bytes(ATTRIBUTES_MAX // 2)
        store.rollback()
        assert seen(store) == {"x": {"of": "x"}} and store.check().ok


def test_a_changed_copy_is_noticed(open_store: Open) -> None:
    store = open_store()
    fill(store)
    store.attrs("x").update(dims=["y"], other=[1])
    store.commit()
    dims, other = store.attrs("x")["dims"], store.attrs("x")["other"]
    other.append(2)
    store.attrs("x")["other"] = other
    store.attrs("x").setdefault("log", []).append("first")
    with pytest.warns(pmstore.LostUpdateWarning, match=r"store\.attrs\('x'\)\['log'\] = value"):
        store.commit()
    dims.append("x")
    with pytest.warns(pmstore.LostUpdateWarning, match=r"store\.attrs\('x'\)\['dims'\] = value") as found:
        store.close()
    assert len(found) == 1


def test_a_fork_reads_them(open_store: Open) -> None:
    with open_store() as store:
        fill(store)
        store.commit()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if store.attrs("g/w")["of"] == "g/w" else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_archive_has_them(tmp_path: Path) -> None:
    pytest.importorskip("numcodecs")
    with pmstore.open(tmp_path / "run.pm") as store:
        drain = store.drain(str(tmp_path / "archive"))
        states = []
        for k in range(3):
            with store.transaction():
                fill(store) if k == 0 else store.attrs("g/w").update(k=k)
                if k == 2:
                    store.attrs()["k"] = list(range(2000))
                    store.attrs("g")["k"] = store["x"] = k
            drain.wait()
            states.append(seen(store))
        drain.close()
    archive = pmstore.archive.open(str(tmp_path / "archive"))
    versions = list(archive)
    assert [seen(archive[version]) for version in versions] == states
    with pytest.raises(pmstore.ReadOnlyStoreError):
        archive[versions[0]].attrs("g/w")["of"] = 1
    assert {name: one.kind for name, one in archive.diff(*versions[:2]).items()} == {"g/w": "attributes"}
    found = {name: one.kind for name, one in archive.diff(*versions[1:]).items()}
    assert found == {"": "attributes", "g": "attributes", "g/w": "attributes", "x": "replaced"}
    archive.restore(tmp_path / "restored.pm", versions[-1])
    with pmstore.open(tmp_path / "restored.pm", verify=True) as store:
        assert seen(store) == states[-1] and store.check().ok


def test_listings_show_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run.pm")
    with pmstore.open(path) as store:
        fill(store)
        store.attrs("g/w").clear()
        store.attrs("g/w").update(units="K", dims=["y", "x"])
        store.attrs("x")["bell"] = "\a" * 100
        assert "├─ g/" in str(store) and "[units='K', dims=['y', 'x']]" in str(store)
        assert "[units=&#x27;K&#x27;" in store._repr_html_()
    assert _cli.main(["ls", "-l", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("g/w") and lines[2].endswith("96 B     [units='K', dims=['y', 'x']]"), lines
    assert lines[1].endswith("[of='g/l']") and "\a" not in "".join(lines)
    assert _cli.main(["ls", "-lt", path]) == 0
    assert any("g/" in line and line.endswith("[of='g']") for line in capsys.readouterr().out.splitlines())
    assert _cli.main(["ls", path]) == 0 and "units" not in capsys.readouterr().out
    assert _cli.main(["ls", "--json", path, "g"]) == 0
    found = {row["name"]: row.get("attributes") for row in json.loads(capsys.readouterr().out)}
    assert found == {"g/deep/e": {"of": "g/deep/e"}, "g/l": {"of": "g/l"}, "g/w": {"units": "K", "dims": ["y", "x"]}}
    assert _cli.main(["info", path]) == 0 and "of 7 names" in capsys.readouterr().out


# ---- crashes


def described(store: pmstore.Store) -> None:
    """Each commit has an array and the attributes that belong to it; they grow, move and go together."""
    x = store.create_array("g/x", 700)
    store.attrs("g/x")["k"] = 0
    store.attrs("g")["k"] = 0
    store.commit()
    for k in range(1, 9):
        with store.transaction():
            store["g/x"][k * 50 :] = k
            store.attrs("g/x").update(k=k, pad="p" * (k % 2 * 3000))
            store.attrs("g")["k"] = k
        if k == 4:
            with store.transaction():
                store.rename("g", "h")
                store.copy("h/x", "copy")
            with store.transaction():
                store.rename("h", "g")
                del store["copy"]
    del x
    del store["g/x"]
    store.commit()


def assert_they_belong_together(store: pmstore.Store) -> None:
    assert store.check().ok
    described = {key[1:-1].decode() for key in entries(store)}
    groups = {name.rpartition("/")[0] for name in store}
    assert described == {*store, *groups} - {""}, "I38"
    for name in store:
        k = int(store[name].max())
        about = store.attrs(name)
        assert about["k"] == k and about.get("pad", "") == "p" * (k % 2 * 3000)
        if "/" in name:
            assert store.attrs(name[0])["k"] == k


def test_I38_a_crash_leaves_array_and_attributes_of_one_commit(crash_explorer: Any) -> None:
    crash_explorer.run(described, check=assert_they_belong_together, budget=BUDGET)


def test_I38_commits_that_are_durable_later(tmp_path: Path) -> None:
    assert_survives(record(tmp_path / "store.pm", "file", described, **ASYNC))


def test_an_int_that_python_makes_no_text_of(store: pmstore.Store) -> None:
    store["x"] = 1
    store.attrs("x")["m"] = 1 << 16384
    assert store.attrs("x")["m"] == 1 << 16384
    assert "m=0x1000" in str(store) and "'m': 0x1000" in repr(store.attrs("x"))


def test_copies_are_the_attributes_and_pickles_need_a_dict(store: pmstore.Store) -> None:
    store["x"] = 1
    store.attrs("x")["unit"] = "K"
    attributes = store.attrs("x")
    assert copy.copy(attributes) is copy.deepcopy(attributes) is attributes
    with pytest.raises(TypeError, match=r"pickle dict\(attributes\)"):
        pickle.dumps(attributes)
    assert pickle.loads(pickle.dumps(dict(attributes))) == {"unit": "K"}
