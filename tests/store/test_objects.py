"""Registered types: values that are kept as parts, with live arrays (I37)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import warnings
from typing import Any, Generic, TypeVar

import msgpack
import numpy as np
import pytest

import pmstore
import pmstore.testing
from pmstore._catalog.kinds import OBJECT
from pmstore._store import hooks
from pmstore._values import registry
from tests.support.registered import Colour, Layer, Level, Model, Point, Slots, Way, cli, parts_in, sound, types  # noqa: F401

SMALL = [
    Colour.RED, Colour.GREEN, Level.LOW, Way.UP, Way.UP | Way.LEFT, Way(0), Point(1, "a"), Slots(1, {2}),
    Layer([1, 2], "x", Colour.RED), {"c": [Colour.RED], Colour.GREEN: (Way.UP, Point(Level.LOW, None))},
    Layer(Layer(Layer(None))), {Colour.RED, Level.LOW},
]  # fmt: skip


def test_values_without_arrays(open_store: Any) -> None:
    with open_store() as store:
        items = store.create_list("list")
        for i, value in enumerate(SMALL):
            store[f"v{i}"] = value
            items.append(value)
        sound(store, 0)
    with open_store(mode="r") as store:
        for i, value in enumerate(SMALL):
            assert store[f"v{i}"] == value == store["list"][i] and type(store[f"v{i}"]) is type(value)
        assert store["v0"] is Colour.RED and store["v1"] is Colour.GREEN


def test_arrays_are_live(open_store: Any) -> None:
    with open_store() as store:
        store["g/model"] = Model(np.arange(5.0), 0.1)
        model = store["g/model"]
        assert type(model) is Model and model == Model(np.arange(5.0), 0.1) and model.weights is not None
        model.weights[0] = 7
        assert store["g/model"].weights is model.weights
        store.commit()
        model.weights[1] = 8
        store.rollback()
        assert model.weights.tolist() == [7, 1, 2, 3, 4]
        store["layer"] = Layer(np.eye(3), "x", Colour.RED)
        store["point"] = Point(np.zeros(0), np.array(5))
        with store.transaction(only=[model.weights]):
            model.weights[2] = 9
        sound(store, 3 + 3 + 2)
    with open_store(mode="r") as store:
        model = store["g/model"]
        assert model.weights.tolist() == [7, 1, 9, 3, 4] and not model.weights.flags.writeable
        layer = store["layer"]
        assert type(layer) is Layer and layer.name == "x" and layer.colour is Colour.RED
        assert layer.weights.tolist() == np.eye(3).tolist()
        assert store["point"].x.shape == (0,) and store["point"].y == 5


def test_nested_arrays_are_copies(store: Any) -> None:
    store["v"] = [Layer(np.arange(3.0)), {"m": Model(np.arange(2), 1.0)}]
    out = store["v"]
    assert out[0].weights.tolist() == [0, 1, 2] and out[1]["m"] == Model(np.arange(2), 1.0)
    out[0].weights[0] = 5
    assert store["v"][0].weights[0] == 0
    sound(store, 0)


def test_names_take_their_parts_along(store: Any) -> None:
    model = Model(np.arange(1000.0), 0.5)
    store["m"] = model
    store.commit()
    live = store["m"].weights
    store.rename("m", "new/m")
    assert store["new/m"].weights is live
    sound(store, 3)
    store.copy("new", "copy")
    copied = store["copy/m"]
    assert copied == model and copied.weights is not live
    sound(store, 6)
    store.move("copy/m", "m")
    sound(store, 6)
    store["m"] = Model(np.arange(3), 1.5)  # other parts
    assert store["m"].weights.tolist() == [0, 1, 2]
    store["m"] = np.arange(4.0)
    sound(store, 3)
    store["m"] = Colour.RED
    store["m"] = store["new/m"]
    sound(store, 6)
    assert store.pop("m") == model
    sound(store, 3)
    live[0] = 5
    store.rollback()
    assert store["m"] == model and "new/m" not in store
    sound(store, 3)
    del store["m"]
    sound(store, 0)
    store.commit()
    sound(store, 0)
    assert store.setdefault("m", model) == model
    store.clear()
    sound(store, 0)


def test_a_value_replaces_itself(store: Any) -> None:
    store["m"] = Model(np.arange(1000.0), 0.5)
    model = store["m"]
    model.weights[0], model.rate = 5, 0.7
    store["m"] = model
    assert store["m"] == model and store["m"].weights is model.weights
    model.weights[1] = 9  # it is still live
    assert store["m"].weights[1] == 9
    sound(store, 3)
    store.commit()
    model.weights[2], model.rate = 7, 0.9
    store["m"] = model
    store.rollback()
    assert store["m"].weights is model.weights and model.weights[:3].tolist() == [5, 9, 2]
    assert store["m"].rate == 0.7
    model.weights = np.arange(1000.0)  # another array
    store["m"] = model
    assert store["m"].weights is not model.weights
    sound(store, 3)


@pytest.mark.parametrize("at", ["before", "after"])
def test_I37_an_interrupt_while_live_parts_move(store: Any, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    store["m"] = Model(np.arange(3000.0), 0.5)
    store.commit()
    model = store["m"]
    model.weights[0] = 5
    model.rate = 0.7
    kind = type(hooks.core_of(store))
    real = kind.put

    def interrupted(self: Any, *arguments: Any) -> None:
        if arguments[1].kind != OBJECT:
            return real(self, *arguments)
        monkeypatch.undo()
        if at == "after":
            real(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store["m"] = model
    assert store["m"].weights is model.weights and model.weights[0] == 5
    assert store["m"].rate == (0.7 if at == "after" else 0.5)
    sound(store, 3)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        store.commit()
    # Unless the object was put, its rate is not in the store, and the program may not know.
    lost = [] if at == "after" else [pmstore.LostUpdateWarning]
    assert [warning.category for warning in given] == lost
    sound(store, 3)


def test_other_stores(open_store: Any, store: Any) -> None:
    store["m"] = Model(np.arange(10.0), 0.5)
    with open_store("other.pm") as other:
        other["m"] = store["m"]
        other["m"].weights[0] = 5
        assert store["m"].weights[0] == 0
        sound(other, 3)


def test_types_that_are_not_registered(open_store: Any) -> None:
    thing = pmstore.Parts("lib.Thing", {"b": np.arange(20), "a": 1, "colour": Colour.RED})
    small = pmstore.Parts("lib.Small", {"a": [1]})
    with open_store() as store:
        store["t"], store["s"], store["l"] = thing, small, [small, thing]
        assert store["t"] == thing and list(store["t"]) == ["b", "a", "colour"] and store["t"].type_name == "lib.Thing"
        store["t"]["b"][0] = 7  # live
        store["copy"] = store["t"]
    with open_store() as store:
        for name in ("t", "copy"):
            out = store[name]
            assert type(out) is pmstore.Parts and out["b"][0] == 7 and dict(out)["colour"] is Colour.RED
        assert store["s"] == small and store["l"] == [small, thing] and hash(small) == hash(store["s"])
        assert "pmstore.register(the type, encode, decode, name='lib.Thing')" in repr(out)
        assert "(20,) int64" in repr(out) and "'a': [1]" in repr(store["s"])
        with pytest.raises(TypeError):
            out["b"] = 1  # type: ignore[index]
        sound(store, 6)


def test_parts_of_any_value(store: Any) -> None:
    store["g/m"], store["c"], store["x"], store["i"] = Model(np.arange(3.0), 0.5), Colour.RED, np.zeros(3), 5
    store.create_list("l")
    parts = store.group("g").parts("m")
    assert parts["weights"] is store["g/m"].weights and parts.type_name == "Model"
    assert dict(store.parts("c")) == {"name": "RED"}
    for name in ("x", "i", "l"):
        with pytest.raises(TypeError, match="has no parts"):
            store.parts(name)
    with pytest.raises(KeyError):
        store.parts("nothing")


# ---- errors


@pytest.mark.parametrize("kind", ["object", "list"])
def test_I37_two_names_of_one_object_are_a_problem(open_store: Any, kind: str) -> None:
    with open_store() as store:
        if kind == "object":
            store["a"] = Model(np.arange(5.0), 0.5)
        else:
            store.create_list("a").extend([1, [2]])
        core = hooks.core_of(store)
        core.put(b"nb", core.get(b"na"))
        (problem,) = store.check()
        assert problem.name == "b" and problem.text.endswith("are those of 'a', too")
    report = pmstore.salvage(store.path, f"{store.path}.new")
    assert [problem.name for problem in report] == ["b"]
    with pmstore.open(f"{store.path}.new") as new:
        assert new.check().ok and sorted(new) == ["a", "b"]


def test_errors_of_register() -> None:
    class Other:
        pass

    for wrong in (5, "x", Other()):
        with pytest.raises(TypeError, match="takes a class"):
            pmstore.register(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="both encode and decode"):
        pmstore.register(Other, vars)
    with pytest.raises(TypeError, match="no enum, dataclass or named tuple"):
        pmstore.register(Other)
    with pytest.raises(TypeError, match="are functions"):
        pmstore.register(Other, 1, 2)  # type: ignore[arg-type]
    for name in ("", "x" * 256, "\udcff"):
        with pytest.raises(ValueError, match="the name of a type"):
            pmstore.register(Other, vars, Other, name=name)
    with pytest.raises(TypeError, match="the name of a type is a str"):
        pmstore.register(Other, vars, Other, name=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'Model': the type is registered already, as 'Model'|registered already"):
        pmstore.register(Model, Model.encode, Model.decode)
    with pytest.raises(ValueError, match=r"the name 'Model' belongs to the type .*Model: give another"):
        pmstore.register(Other, vars, Other, name="Model")
    for name in ("numpy.recarray", "polars.DataFrame", "pyarrow.Table", "scipy.sparse.csr_array"):  # imported or not
        with pytest.raises(ValueError, match=f"the name '{name}' belongs to a type that stores keep without register"):
            pmstore.register(Other, vars, Other, name=name)
    for kind in (int, dict, set, np.ndarray, np.float32, pmstore.Parts, np.random.Generator, np.recarray):
        with pytest.raises(ValueError, match="already"):
            pmstore.register(kind, vars, kind)
    assert registry.registered(Other) is None


def test_a_dataclass_that_is_an_exception(store: Any) -> None:
    @dataclasses.dataclass
    class Failure(ValueError):
        code: int

    pmstore.register(Failure)
    store["v"] = Failure(5)
    assert type(store["v"]) is Failure and store["v"].code == 5 and str(store["v"]) == str(Failure(5)) == "5"


@pytest.mark.parametrize("base", [collections.OrderedDict, list, float, collections.deque, str])
def test_a_dataclass_with_contents_besides_its_fields(base: type, store: Any) -> None:
    @dataclasses.dataclass
    class Both(base):  # type: ignore[misc]
        loss: float = 0.0

    with pytest.raises(TypeError, match=f"Both is a dataclass, and has what a {base.__name__} holds"):
        pmstore.register(Both)
    with pytest.raises(TypeError):
        store["v"] = Both()


T = TypeVar("T")


def test_a_dataclass_of_bases_without_contents(store: Any) -> None:
    class Base:
        __slots__ = ("rate",)

    @dataclasses.dataclass
    class Derived(Base, Generic[T]):
        rate: float

    pmstore.register(Derived)
    store["v"] = Derived(0.5)
    assert store["v"] == Derived(0.5)


def test_attributes_that_are_no_fields_are_refused(store: Any) -> None:
    """A copy would lack them."""

    class Slotted:
        __slots__ = ("unit",)

    @dataclasses.dataclass
    class Counted(Slotted, Generic[T]):
        rate: float
        steps: int = dataclasses.field(default=0, init=False)

        @functools.cached_property
        def double(self) -> float:
            return 2 * self.rate

    class Pair(collections.namedtuple("Pair", "a b")):
        pass

    for kind in (Counted, Pair):
        pmstore.register(kind)
    sound = Counted[int](0.5)
    assert sound.double == 1.0
    sound.steps = 7
    store["v"] = [sound]
    again = store["v"][0]
    assert again == sound and again.steps == 7 and again.double == 1.0
    store["pair"] = Pair(1, 2)
    for value in (Counted(1.0), Pair(1, 2)):
        for name in ("other", "unit"):
            setattr(value, name, "mm")
            with pytest.raises(TypeError, match=f"has attributes that are no fields: '{name}'.*or register"):
                store["v"] = value
            delattr(value, name)
    assert store["v"] == [sound] and store["pair"] == Pair(1, 2)


def test_the_name_of_a_type_does_not_affect_a_terminal() -> None:
    assert repr(pmstore.Parts("\x1b[2J", {})).startswith("<Parts of a \\x1b[2J {}")


def test_a_class_that_is_defined_again_takes_over_the_name(store: Any) -> None:
    def define() -> Any:
        @dataclasses.dataclass
        class Again:
            a: int

        return Again

    one, other = define(), define()
    pmstore.register(one)
    store["v"] = one(5)
    pmstore.register(other)
    assert type(store["v"]) is other
    with pytest.raises(TypeError):
        store["w"] = one(6)
    assert "w" not in store


class Odd:
    def __init__(self, parts: Any) -> None:
        self.parts = parts


BAD = [
    ([1], "a dict of str to parts, not list"),
    (None, "a dict of str to parts, not NoneType"),
    ({1: 2}, "the name of a part of a odd is a str"),
    ({"": 2}, "has 1 to 255 bytes"),
    ({"x" * 256: 2}, "has 1 to 255 bytes"),
    ({"a": np.zeros(3), "b": object()}, "the part 'b' of a odd: a store can't keep a builtins.object"),
    ({"a": object()}, "the part 'a' of a odd"),
    ({"a": np.zeros(3), "b": np.array([object()])}, "the part 'b' of a odd: .*Python objects"),
]


@pytest.mark.parametrize("parts, hint", BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_can_not_be_stored_leaves_everything(store: Any, parts: Any, hint: str) -> None:
    if registry.registered(Odd) is None:
        pmstore.register(Odd, lambda odd: odd.parts, Odd, name="odd")
    store["m"] = Model(np.arange(3.0), 0.5)
    before = [tuple(row) for row in hooks.core_of(store).scan(b"")]
    for name in ("m", "new"):
        for value in (Odd(parts), [Odd(parts)]):
            with pytest.raises((TypeError, ValueError), match=hint):
                store[name] = value
    assert [tuple(row) for row in hooks.core_of(store).scan(b"")] == before


ARRAY = np.arange(3)
BAD_PARTS = [
    (pmstore.Parts("", {"a": ARRAY}), "the name of the type of a Parts has 1 to 255 bytes"),
    (pmstore.Parts("x" * 300, {"a": ARRAY}), "the name of the type of a Parts has 1 to 255 bytes"),
    (pmstore.Parts(5, {"a": ARRAY}), "the name of the type of a Parts is a str, not int"),  # type: ignore[arg-type]
    (pmstore.Parts("\ud800", {"a": ARRAY}), "holds a lone surrogate"),
    (pmstore.Parts("t", {"": ARRAY}), "the name of a part of a t has 1 to 255 bytes"),
    (pmstore.Parts("t", {"k" * 300: 1}), "the name of a part of a t has 1 to 255 bytes"),
    (pmstore.Parts("t", {1: 1}), "the name of a part of a t is a str, not int"),  # type: ignore[dict-item]
    (pmstore.Parts("t", {"a": ARRAY, "\ud800": 1}), "holds a lone surrogate"),
]


@pytest.mark.parametrize("parts, hint", BAD_PARTS, ids=[str(i) for i in range(len(BAD_PARTS))])
def test_names_of_parts_are_checked(store: Any, parts: pmstore.Parts, hint: str) -> None:
    store["m"] = Model(np.arange(3.0), 0.5)
    before = [tuple(row) for row in hooks.core_of(store).scan(b"")]
    for name in ("m", "new"):
        for value in (parts, [parts]):
            with pytest.raises((TypeError, ValueError), match=hint):
                store[name] = value
    assert [tuple(row) for row in hooks.core_of(store).scan(b"")] == before


@pytest.mark.parametrize("meta, left", [([None, 2, ""], 0), ([None, 2], 3), ([0, 2, "t"], 3)])
def test_a_damaged_object_can_be_deleted_and_replaced(store: Any, meta: list[Any], left: int) -> None:
    core = hooks.core_of(store)
    for change in (lambda: store.__delitem__("m"), lambda: store.__setitem__("m", 1)):
        for row in list(core.scan(b"o")):
            core.delete(row.key)
        store["m"] = Model(np.arange(3.0), 0.5)
        entry = core.get(b"nm")
        number = msgpack.unpackb(entry.meta)[0]
        core.put(b"nm", entry._replace(meta=msgpack.packb([number if one is None else one for one in meta])))
        with pytest.raises(pmstore.CorruptStoreError):
            store["m"]
        change()
        assert store.get("m") in (None, 1) and len(list(core.scan(b"o"))) == left
        store.commit()


def test_an_encode_that_fails(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store["m"] = Model(np.arange(3.0), 0.5)
    monkeypatch.setattr(Model, "fails", "encode")
    with pytest.raises(RuntimeError, match="encode fails"):
        store["m"] = Model(np.arange(4.0), 0.6)
    monkeypatch.undo()
    assert store["m"] == Model(np.arange(3.0), 0.5)
    sound(store, 3)


def test_a_decode_that_fails(open_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store:
        store["m"], store["l"] = Model(np.arange(3.0), 0.5), [Model(np.arange(3.0), 0.5)]
        store.create_list("p").append(Model(np.arange(3.0), 0.5))
        monkeypatch.setattr(Model, "fails", "decode")
        for look in (lambda: store["m"], lambda: store["l"], lambda: store["p"][0], lambda: store.get("m")):
            with pytest.raises(pmstore.DecodeError, match=r"^'.*decode of Model failed: ZeroDivision.*Store.parts"):
                look()
        assert store.parts("m")["weights"].tolist() == [0, 1, 2]
        assert "Model" in str(store)
        sound(store, 3)
        path = store.path
    code, out = cli("dump", path)
    assert code == 0 and "decode fails" not in out and "'rate': 0.5" in out


class Other:
    """What `decode` makes of a stored Source: a value that no store keeps."""

    def __init__(self, data: Any) -> None:
        self.data = data


class Source(Other):
    pass


@pytest.fixture
def sources() -> None:
    if registry.registered(Source) is None:
        pmstore.register(Source, lambda one: {"data": one.data}, lambda parts: Other(parts["data"]), name="source")


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("data", [b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff", [b"\xd6\xff", 0xD6FF]])
def test_any_bytes_when_decode_gives_another_type(store: Any, data: Any) -> None:
    store["v"], store["o"] = [Source(data)], Source([data, np.arange(3)])
    assert type(store["v"][0]) is Other and store["v"][0].data == data and store["o"].data[0] == data
    assert store.check().ok


def test_a_part_nested_as_deep_as_can_be(store: Any, recwarn: pytest.WarningsRecorder) -> None:
    deep: Any = 1
    for _ in range(128):
        deep = [deep]
    store["v"] = Layer(np.zeros(3), deep)
    store.commit()
    value = store["v"]
    assert value.name == deep
    store.commit()
    assert not recwarn.list
    value.name[0] = 5
    with pytest.warns(pmstore.LostUpdateWarning):
        store.commit()
    with pytest.raises(ValueError, match="128 levels"):
        store["v"] = Layer(np.zeros(3), [deep])


class Careless:
    def __init__(self, fails: Any) -> None:
        self.fails = fails


@pytest.mark.parametrize(
    "fails, hint",
    [(lambda: json.loads("{"), "Expecting property name"), (lambda: b"\xff".decode(), "can't decode byte 0xff")],
)
def test_an_encode_that_fails_inside_of_a_part(store: Any, fails: Any, hint: str) -> None:
    if registry.registered(Careless) is None:
        pmstore.register(Careless, lambda one: {"a": one.fails()}, Careless, name="careless")
    for value in (Careless(fails), [Careless(fails)], Layer(np.zeros(2), Careless(fails))):
        with pytest.raises(ValueError, match=hint):
            store["v"] = value
    with pytest.raises(ValueError, match="the part 'name' of a .*Layer: .*" + hint) as caught:
        store["v"] = value
    assert isinstance(caught.value.__cause__, (json.JSONDecodeError, UnicodeDecodeError)) and "v" not in store


def test_a_class_that_has_changed(store: Any) -> None:
    store["a"], store["b"] = pmstore.Parts("tests.support.registered.Slots", {"a": 1, "z": 2}), Colour.RED
    with pytest.raises(pmstore.DecodeError, match="the stored fields are not those of the class: b, z"):
        store["a"]
    store["c"] = pmstore.Parts("tests.support.registered.Colour", {"name": "BLUE"})
    with pytest.raises(pmstore.DecodeError, match="'c': .*KeyError: 'BLUE'"):
        store["c"]


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("error", [KeyboardInterrupt, pmstore.OutOfSpaceError])
def test_I37_an_interrupted_assignment_leaves_the_old_value(
    store: Any, monkeypatch: pytest.MonkeyPatch, at: int, error: Any
) -> None:
    store["m"] = Model(np.arange(3000.0), 0.5)
    store.commit()
    core, calls = hooks.core_of(store), []
    kind, put = type(core), type(core).put

    def failing(self: Any, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == at // 2 + 1 and at % 2 == 0:
            raise error(28, "full")
        put(self, *arguments)
        if len(calls) == at // 2 + 1:
            raise error(28, "full")

    monkeypatch.setattr(kind, "put", failing)
    for name in ("m", "new"):
        calls.clear()
        with pytest.raises(error):
            store[name] = Model(np.arange(2000.0), 0.7)
    monkeypatch.undo()
    assert store["m"].rate == 0.5 and "new" not in store
    sound(store, 3)
    store.commit()
    sound(store, 3)


def test_no_room_leaves_the_old_value(open_store: Any) -> None:
    with open_store(max_size=1 << 20) as store:
        store["m"] = Model(np.arange(3000.0), 0.5)
        with pytest.raises(pmstore.OutOfSpaceError):
            store["m"] = Model(np.zeros(1 << 20), 0.5)
        assert store["m"].weights[-1] == 2999
        sound(store, 3)


def test_other_calls_say_what_it_is(store: Any) -> None:
    store["m"] = Model(np.arange(3000.0), 0.5)
    with pytest.raises(pmstore.NameConflictError, match="a Model"):
        store.require_array("m", 3)
    with pytest.raises(pmstore.NameConflictError, match="taken"):
        store.create_list("m")
    with pytest.raises(pmstore.NameConflictError):
        store["m/x"] = 1
    with pytest.raises(pmstore.DerivedArrayError, match="several arrays"):
        store.derive("d", np.negative, "m").value  # noqa: B018
    store.release("m")
    store.release()
    assert store["m"].weights[5] == 5


def test_names_of_parts_that_a_program_makes(store: Any) -> None:
    """Parts that could not be read again are refused, and the old value stays."""
    store["o"] = 1
    for kind, name in (("t", ""), ("t", "x" * 256), ("", "w"), ("t" * 256, "w")):
        with pytest.raises(ValueError, match="1 to 255 bytes"):
            store["o"] = pmstore.Parts(kind, {name: np.arange(3)})
    assert store["o"] == 1 and store.check().ok
