"""Names: which are taken, how they order, groups."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmstore

BAD = ["", "/", "a//b", "/a", "a/", "a\0b", "\ud800", "a/\udfff", "x" * 765, "é" * 383]


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_bad_names_are_refused_everywhere(store, name):
    for use in (
        lambda: store[name],
        lambda: store.__setitem__(name, 1),
        lambda: store.__delitem__(name),
        lambda: store.get(name),
        lambda: store.setdefault(name, 1),
        lambda: store.create_array(name, 3),
        lambda: store.require_array(name, 3),
        lambda: store.create_list(name),
        lambda: store.group(name),
    ):
        with pytest.raises(pmstore.InvalidNameError):
            use()
    assert name not in store
    assert len(store) == 0


@pytest.mark.parametrize("name", [5, None, b"a", ("a",), 1.5])
def test_a_name_that_is_not_a_str(store, name):
    for use in (lambda: store[name], lambda: store.__setitem__(name, 1), lambda: store.get(name)):
        with pytest.raises(TypeError, match="a name is a str"):
            use()
    assert name not in store


def test_the_limit_is_in_the_message(store):
    with pytest.raises(ValueError, match="764 bytes in UTF-8.*765"):
        store["x" * 765] = 1


@pytest.mark.parametrize("name", ["x" * 764, "é" * 382, "a b", ".", "..", "\n", "日本/語", "🦀"], ids=ascii)
def test_odd_names_are_kept(open_store, name):
    with open_store() as store:
        store[name] = 1
    with open_store() as store:
        assert list(store) == [name]
        assert store[name] == 1
        del store[name]
        assert name not in store


def test_an_unknown_name(store):
    store["weights"] = 1
    store["model/bias"] = 2
    with pytest.raises(KeyError, match="no name 'weigths' in the store; near it: 'weights'"):
        store["weigths"]
    with pytest.raises(pmstore.UnknownNameError, match=r"it is a group, group\('model'\) gives it"):
        store["model"]
    with pytest.raises(KeyError, match="near it: 'bias'"):
        store.group("model")["bais"]
    with pytest.raises(KeyError):
        del store["nothing"]
    with pytest.raises(KeyError):
        store.pop("nothing")
    assert store.pop("nothing", 3) == 3
    assert store.get("nothing") is None


def test_an_unknown_name_of_a_group(store):
    store["a/b/weights"] = 1
    group = store.group("a").group("b")
    for use in (lambda: group["weigths"], lambda: group.pop("weigths"), lambda: group.__delitem__("weigths")):
        with pytest.raises(KeyError) as caught:
            use()
        assert str(caught.value) == "no name 'weigths' in the group 'a/b'; near it: 'weights'"
    assert "in the group 'a/b'" in str(pickle.loads(pickle.dumps(caught.value)))


def test_an_unknown_name_of_a_store_closed_meanwhile(store):
    with pytest.raises(KeyError) as caught:
        store["a"]
    store.close()
    assert str(caught.value) == "no name 'a' in the store"


def test_a_name_is_a_value_or_a_group(store):
    store["a/b"] = 1
    for name in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(pmstore.NameConflictError):
            store[name] = 2
        with pytest.raises(pmstore.NameConflictError):
            store.create_array(name, 3)
        with pytest.raises(pmstore.NameConflictError):
            store.create_list(name)
    assert list(store) == ["a/b"]
    store["ab"] = store["a/bc"] = 3
    del store["a/b"], store["a/bc"]
    store["a"] = 4
    assert list(store) == ["a", "ab"]


def test_groups(store):
    store["w"] = 0
    model = store.group("model")
    assert list(model) == [] and len(model) == 0
    model["w"] = 1
    model.group("layer")["bias"] = 2
    model.create_array("x", 3)[:] = 5
    assert list(store) == ["model/layer/bias", "model/w", "model/x", "w"]
    assert list(model) == ["layer/bias", "w", "x"]
    assert store["model/layer/bias"] == model["layer/bias"] == model.group("layer")["bias"] == 2
    assert store["model/x"] is model["x"]
    assert "w" in model and "layer" in model and "model/w" not in model
    assert len(model) == 3
    assert model.name == "model" and model.group("layer").name == "model/layer" and model.store is store
    assert model == store.group("model") != store.group("layer") and hash(model) == hash(store.group("model"))
    assert dict(model.group("layer")) == {"bias": 2}
    model.clear()
    assert list(store) == ["w"]


def test_group_prefixes_are_whole_parts(store):
    store["a/x"] = 1
    store["ab/x"] = 2
    assert dict(store.group("a")) == {"x": 1}
    store.group("a").clear()
    assert list(store) == ["ab/x"]


def test_lists_do_not_count_as_names(store):
    items = store.create_list("items")
    items.extend(range(50))
    store["x"] = 1
    assert len(store) == 2 and list(store) == ["items", "x"]
    assert len(store.group("items")) == 0


def test_many_names_are_sorted(store):
    names = [f"g{i % 7}/n{i * 7919 % 3000}" for i in range(3000)]
    for i, name in enumerate(names):
        store[name] = i
    assert list(store) == sorted(names)
    assert len(store) == 3000
    assert {name: store[name] for name in store} == dict(zip(names, range(3000)))
    for name in store:  # deleting while iterating
        del store[name]
    assert len(store) == 0 and list(store) == []


parts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=8)


@given(st.lists(st.lists(parts, min_size=1, max_size=3).map("/".join), max_size=8, unique=True))
def test_iteration_is_by_code_point(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "s"
    with pmstore.open(path) as store:
        taken = []
        for name in names:
            try:
                store[name] = name
                taken.append(name)
            except pmstore.NameConflictError:
                assert any(name.startswith(t + "/") or t.startswith(name + "/") for t in taken)
        assert list(store) == sorted(taken)
        assert all(store[name] == name for name in taken)
