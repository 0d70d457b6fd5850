"""Dates, sets, decimal numbers, paths, generators and the other types of pmstore/_values/types.py."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import pathlib
import re
import types
import uuid
import zoneinfo
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pmstore
from pmstore._resume.attributes import decode as attributes_of
from pmstore._resume.attributes import graph_of
from pmstore._resume.fingerprint import describe
from pmstore._values import types as kinds
from pmstore._values import values
from pmstore._values.as_json import to_json
from pmstore._values.values import decode, encode
from tests.conftest import LONGER

Text = np.dtypes.StringDType
PARIS = zoneinfo.ZoneInfo("Europe/Paris")
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30, microseconds=1), "east")

PLAIN = [
    set(), {1, "a", (1, 2), None, b"x"}, frozenset({frozenset({1}), 2.5}), {frozenset()},
    collections.OrderedDict(b=1, a=[{3}]), collections.OrderedDict(),
    datetime.date.min, datetime.date(2024, 2, 29), datetime.time(), datetime.time(1, 2, 3, 4, fold=1, tzinfo=PARIS),
    datetime.datetime(2024, 10, 27, 2, 30), datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=PARIS),
    datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.datetime(2020, 1, 1, tzinfo=EAST),
    datetime.timedelta(), datetime.timedelta(-5, 3, 7), datetime.timedelta.max, datetime.timedelta.min,
    decimal.Decimal("-0.00"), decimal.Decimal("NaN123"), decimal.Decimal("-sNaN"), decimal.Decimal("1E+99999"),
    decimal.Decimal("Infinity"), fractions.Fraction(-7, 2**80), fractions.Fraction(0), uuid.UUID(int=2**127 + 5),
    pathlib.Path("/a/\udcff b"), pathlib.PurePosixPath("x/y"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path(),
    slice(None), slice(1, 2**70, "x"), range(0), range(5, 2**80, 3), range(9, 0, -2),
    {decimal.Decimal(1): {datetime.date(2020, 1, 1)}, (uuid.UUID(int=1),): [{fractions.Fraction(1, 3)}]},
]  # fmt: skip
TEXTS = [
    np.array([["a", "日\0"], ["", "x" * 500]], Text()),
    np.array([["a", "b"], ["", None]], Text(na_object=None)).T,
    np.array(["a", np.nan], Text(na_object=np.nan, coerce=False)),
    np.array(["a", "NA"], Text(na_object="NA")),
    np.array([], Text()),
    np.zeros((0, 3), Text(na_object=None)),
    np.array("s", Text()).reshape(()),
]


def form(value):
    """What tells two values apart, down to types, zones, signs and the order of keys."""
    if isinstance(value, dict):
        return [type(value), [(form(key), form(item)) for key, item in value.items()]]
    if isinstance(value, (set, frozenset)):
        return [type(value), sorted(map(repr, map(form, value)))]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(form, value)]
    if isinstance(value, slice):
        return [slice, form(value.start), form(value.stop), form(value.step)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.flags.c_contiguous, repr(value.tolist())]
    return [type(value), repr(value)]


def test_round_trip(open_store):
    values = {f"v{number}": value for number, value in enumerate(PLAIN + TEXTS)}
    with open_store() as store:
        items = store.create_list("list")
        for name, value in values.items():
            store[name] = value
            store[f"in/{name}"] = {"x": (value,)}
            items.append(value)
            assert form(store[name]) == form(value)
    for mode in ("r+", "r"):
        with open_store(mode=mode) as store:
            for i, (name, value) in enumerate(values.items()):
                assert form(store[name]) == form(value)
                assert form(store[f"in/{name}"]) == form({"x": (value,)})
                assert form(store["list"][i]) == form(value)
            assert store.check().ok


def test_an_array_of_text_takes_the_place_of_any_value(store):
    live = store.create_array("a", 3)
    texts = np.array(["a", "b" * 10**5], Text())
    store["a"] = texts
    live += 1  # detached
    assert store["a"].tolist() == texts.tolist() and store["a"].dtype == Text()
    store["a"] = np.zeros(3)
    assert store["a"].dtype == float
    with pytest.raises(TypeError, match="StringDType"):
        store.create_array("b", 3, Text())
    with pytest.raises(TypeError, match="missing value is"):
        store["c"] = np.array(["a"], Text(na_object=object()))
    assert list(store) == ["a"]


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_generators_go_on(open_store, kind):
    generator = np.random.Generator(getattr(np.random, kind)(5))
    generator.integers(5, dtype="u4")
    generator.spawn(2)
    with open_store() as store:
        store["g"], store["l"] = generator, [generator]
    with open_store(mode="r") as store:
        out = store["g"]
        assert encode(store["l"]) == encode([generator])
        assert type(out) is np.random.Generator and type(out.bit_generator) is type(generator.bit_generator)
        assert encode(out) == encode(generator)
        assert out.spawn(1)[0].random() == generator.spawn(1)[0].random()
        assert out.integers(5, dtype="u4") == generator.integers(5, dtype="u4")
        assert out.random(1000).tolist() == generator.random(1000).tolist()


def test_a_generator_over_a_random_state_goes_on(store):
    generator = np.random.Generator(np.random.RandomState(5)._bit_generator)
    store["g"] = generator
    out = store["g"]
    assert out.random() == generator.random()
    with pytest.raises(TypeError):  # as the original: it has no seeds for children
        out.spawn(1)


@pytest.mark.parametrize(
    "value, change",
    [
        ({1, 2}, lambda v: v.add(3)),
        (collections.OrderedDict(a=1), lambda v: v.move_to_end("a") or v.update(b=2)),
        (np.random.default_rng(0), lambda v: v.random()),
        (np.array(["a"], Text()), lambda v: v.__setitem__(0, "b")),
        ((1, {"k": {1}}), lambda v: v[1]["k"].clear()),
    ],
    ids=["set", "OrderedDict", "Generator", "StringDType", "nested"],
)
def test_a_changed_copy_gives_a_warning(store, value, change):
    store["v"] = value
    store.commit()
    copy = store["v"]
    change(copy)
    with pytest.warns(pmstore.LostUpdateWarning, match="'v'"):
        store.commit()


def test_equal_sets_have_equal_bytes():
    words = [f"word {i}" for i in range(100)]
    one, other = set(words), set()
    for word in reversed(words):
        other.add(word)
    assert encode(one) == encode(other)


class Day(datetime.date):
    pass


class Odd(datetime.tzinfo):
    pass


class Words(set):
    pass


@pytest.mark.parametrize(
    "value, hint",
    [
        (Day(2020, 1, 1), "datetime's own class"),
        (Words(), r"store set\(value\)"),
        (datetime.datetime(2020, 1, 1, tzinfo=Odd()), "a zoneinfo.ZoneInfo with a key"),
        (np.random.RandomState(0), "Nothing is pickled"),
        (collections.deque(), "Nothing is pickled"),
        ({object()}, "Nothing is pickled"),
        (slice(object()), "Nothing is pickled"),
        (types.SimpleNamespace(), "Nothing is pickled"),
    ],
)
def test_other_types_are_refused_with_a_hint(store, value, hint):
    for wrapped in (value, [value], {"k": (value,)}):
        with pytest.raises(TypeError, match=hint):
            store["v"] = wrapped
    assert not list(store)


def test_generators_of_others_are_refused(store):
    class Own(np.random.PCG64):
        pass

    class Seeds(np.random.bit_generator.ISeedSequence):
        def generate_state(self, n_words, dtype=np.uint32):
            return np.ones(n_words, dtype)

    with pytest.raises(TypeError, match="a generator over a Own"):
        store["v"] = np.random.Generator(Own())
    with pytest.raises(TypeError, match="seeded with a Seeds"):
        store["v"] = np.random.Generator(np.random.PCG64(Seeds()))
    with pytest.raises(TypeError, match="a pool_size of 1025, but at most 1024"):
        store["v"] = np.random.Generator(np.random.PCG64(np.random.SeedSequence(0, pool_size=1025)))
    assert "v" not in store


def test_a_fraction_of_numpy_numbers(store):
    store["v"] = [fractions.Fraction(np.int64(3), np.int64(4)), fractions.Fraction(np.uint8(3))]
    assert form(store["v"]) == form([fractions.Fraction(3, 4), fractions.Fraction(3)])


def test_nesting_has_a_limit(store):
    value = frozenset()
    for _ in range(127):
        value = frozenset({value})
    store["v"] = value
    assert store["v"] == value
    with pytest.raises(ValueError, match="128 levels"):
        store["v"] = frozenset({value})
    deep = datetime.date(2020, 1, 1)
    for _ in range(127):
        deep = [deep]
    store["w"] = deep
    assert store["w"] == deep
    with pytest.raises(ValueError, match="128 levels"):
        store["w"] = [deep]


def test_values_of_a_newer_version_are_named():
    with pytest.raises(pmstore.CorruptStoreError, match=r"does not know \(extension 99\): a newer version wrote it"):
        decode(msgpack.packb([msgpack.ExtType(99, b"\x90")]))


def test_each_code_has_one_type_and_a_line_in_a_table():
    own = [values._BIG_INT, values._COMPLEX, values._TUPLE, values._SCALAR, values._ARRAY, values._REGISTERED]
    assert sorted(own) == sorted(kinds.CODES_OF_VALUES)
    tables = [re.findall(r"^(\d+) +\w", module.__doc__, re.MULTILINE) for module in (values, kinds)]
    assert sorted(map(int, tables[0] + tables[1])) == sorted([*own, *kinds.BY_CODE])


@pytest.mark.parametrize("code", [21, 6])
def test_a_second_type_with_one_code_is_an_error_at_import(code):
    source = Path(kinds.__file__).read_text(encoding="utf-8")
    line = f'    "complex": ("builtins", Small({code}, list, complex)),\n'
    changed = source.replace('    "set":', f'{line}    "set":')
    assert changed != source
    with pytest.raises(AssertionError, match=f"the code {code} has a type already"):
        exec(compile(changed, kinds.__file__, "exec"), {"__name__": "pmstore._values.more_types"})


def hostile(code, *parts):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(list(parts))))


def state(kind="PCG64", seeds=(5, [], 4, 0), **changed):
    own = dict(getattr(np.random, kind)(0).state)
    return decode(encode([{**own, **changed}, list(seeds)]))


@pytest.mark.parametrize(
    "data",
    [
        hostile(6, 1, 1),
        hostile(6, []),
        hostile(7, {}),
        hostile(8, "a"),
        hostile(8, "a", 1, "a", 2),
        hostile(9, 2020, 13, 1),
        hostile(9, True, 1, 1),
        hostile(10, 1, 1, 1, 1, 2, None),
        hostile(10, 1, 1, 1, None),
        hostile(11, 2020, 1, 1, 0, 0, 0, 0, 0, "../../etc/passwd"),
        hostile(11, 2020, 1, 1, 0, 0, 0, 0, 0, [86400 * 10**6]),
        hostile(11, 2020, 1, 1, 0, 0, 0, 0, 0, []),
        hostile(11, 2020, 1, 1, 0, 0, 0, 0, 0, 5),
        hostile(12, 2**63, 0, 0),
        hostile(12, 1.5, 0, 0),
        hostile(13, "x"),
        hostile(13, 1.5),
        hostile(13, [0, [1], 2]),
        hostile(14, 1, 0),
        hostile(14, 2, 4),
        hostile(14, 1.5, 1),
        hostile(15, b"x"),
        hostile(15, 5),
        hostile(16, "Path", "/"),
        hostile(16, "PosixPath", 5),
        hostile(16, "PosixPath"),
        hostile(17, 1),
        hostile(18, 0, 1, 0),
        hostile(18, 0, 1.5, 1),
        hostile(19, [2], "C", True, [], ["a"]),
        hostile(19, [-1], "C", True, [], []),
        hostile(19, [1], "C", True, [], [None]),
        hostile(19, [1], "C", True, [[]], ["a"]),
        hostile(19, [1], "C", True, [None], [5]),
        hostile(19, [1], "K", True, [], ["a"]),
        hostile(19, [2**40, 0, 2**40], "C", 1, [], []),
        hostile(20, {"bit_generator": "system"}, [5, [], 4, 0]),
        hostile(20, {}, None),
        hostile(20),
        *(
            msgpack.packb(msgpack.ExtType(20, encode(parts)))
            for parts in (
                state(state={}),
                state(state=5),
                state(seeds=(5, [], 2**40, 0)),
                state(seeds=(5, [], 4, -1)),
                state(seeds=("x", [], 4, 0)),
                state("MT19937", state={"key": np.zeros(3, "u4"), "pos": 1}),
                state("MT19937", state={"key": np.zeros(624, "u4"), "pos": 625}),
                state("Philox", buffer_pos=-1),
                state("Philox", buffer=[]),
            )
        ),
        b"\x81" + hostile(6) + b"\xc0",  # a set as a key
    ],
    ids=lambda data: data[:24].hex(),
)
def test_hostile_values(data):
    with pytest.raises(pmstore.CorruptStoreError):
        decode(data)


@pytest.mark.longer
@settings(max_examples=100 * LONGER)
@given(st.data())
def test_damaged_values_give_one_error(data):
    seeds = [*PLAIN, *TEXTS, *(np.random.Generator(kind(0)) for kind in (np.random.Philox, np.random.SFC64))]
    encoded = bytearray(encode(seeds[data.draw(st.integers(0, len(seeds) - 1))]))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(encoded))
    except (pmstore.CorruptStoreError, pmstore.DecodeError):  # DecodeError: another key of a time zone
        pass


leaves = (
    st.dates()
    | st.times(timezones=st.none() | st.timezones())
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.integers()
)
hashables = st.recursive(leaves, lambda v: st.frozensets(v) | st.tuples(v, v), max_leaves=8)
anything = hashables | st.builds(slice, hashables, leaves) | st.lists(leaves).map(collections.OrderedDict.fromkeys)


@settings(max_examples=100)
@given(anything)
def test_any_value_round_trips(value):
    assert form(decode(encode(value))) == form(value)


numbers = st.integers(1, 1000) | st.integers(1, 100).map(np.int64) | st.integers(1, 100).map(np.uint8)
seeds = st.builds(
    np.random.SeedSequence,
    st.none() | numbers | st.lists(numbers) | st.lists(numbers).map(np.array),
    spawn_key=st.lists(numbers).map(tuple),
    pool_size=st.sampled_from([4, 8, 1024, 1025, 2000]),
    n_children_spawned=numbers,
)
unusual = (
    st.builds(fractions.Fraction, numbers, numbers)
    | st.builds(range, numbers, numbers, numbers)
    | st.builds(slice, numbers, numbers)
    | st.builds(pmstore.Parts, st.text(max_size=3) | numbers, st.dictionaries(st.text(max_size=3) | numbers, numbers))
    | seeds.map(lambda one: np.random.Generator(np.random.PCG64(one)))
)


@settings(max_examples=50)
@given(unusual)
def test_what_is_encoded_can_be_decoded(value):
    try:
        encoded = encode([value])
    except (TypeError, ValueError):
        return
    assert encode(decode(encoded)) == encoded


def test_json():
    assert to_json({2, 1, "a"}) == ["a", 1, 2]
    assert to_json(collections.OrderedDict(b=datetime.date(2020, 1, 2))) == {"b": "2020-01-02"}
    assert to_json([datetime.time(1, 2), datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)]) == [
        "01:02:00",
        "2020-01-02T00:00:00+00:00",
    ]
    assert to_json(datetime.timedelta(-1, 3, 500000)) == "-PT86396.5S"
    assert to_json([decimal.Decimal("1.50"), fractions.Fraction(1, 3), pathlib.Path("/a")]) == ["1.50", "1/3", "/a"]
    assert to_json([uuid.UUID(int=1), slice(1, None), range(10**9)]) == [
        "00000000-0000-0000-0000-000000000001",
        {"slice": [1, None, None]},
        {"range": [0, 10**9, 1]},
    ]
    assert to_json(np.array(["a", None], Text(na_object=None))) == ["a", None]
    assert to_json(np.random.default_rng(0))["generator"]["bit_generator"] == "PCG64"


def test_fingerprints_tell_values_apart():
    described = [str(describe(value)) for value in PLAIN + TEXTS]
    assert len(set(described)) == len(described)
    assert describe({"a", "b", 3}) == describe({3, "b", "a"}) != describe(frozenset({"a", "b", 3}))


def test_learned_attributes_can_hold_them():
    roots = {"model": {"seen": {1, 2}, "when": datetime.date(2020, 1, 1), decimal.Decimal(1): frozenset({"x"})}}
    graph = graph_of(roots, {})
    nodes = decode(encode(graph.nodes))
    assert form(attributes_of(nodes, graph.arrays, {})) == form(roots)
