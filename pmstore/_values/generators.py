"""numpy's random generators: their states, as plain values, which are checked before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = [
    "SPAWNED",
    "bit_generator",
    "check_generator_state",
    "counts_children",
    "generator_of",
    "generator_parts",
    "generator_state",
    "parts_of_generator",
    "set_generator_state",
]

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
"""The kinds of generators that a file can name. numpy imports numpy.random when it is used, which takes long."""

_BUFFERS: dict[str, tuple[Any, ...]] = {"MT19937": (624, "state", "pos"), "Philox": (4, "buffer_pos")}
"""numpy's bit generators with a buffer: its size, and the keys of the state that tell how much of it is used."""

SPAWNED = "spawned"
"""The key of the number of children in the state of a generator. numpy's own states lack it."""

_SPAWNED_MAX = (1 << 32) - 1  # numpy counts children in a uint32

_POOL_MAX = 1024  # words of a SeedSequence; numpy's default is 4


def bit_generator(name: Any) -> Any:
    """numpy's class of bit generators of that name. Raises KeyError if there is none."""
    if name not in _BIT_GENERATORS:
        raise KeyError(name)
    return getattr(np.random, name)


def check_generator_state(kind: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError if the state of a bit generator points outside of its buffer: numpy doesn't check that, and
    would read there."""
    if kind in _BUFFERS:
        size, *path = _BUFFERS[kind]
        at: Any = state
        for key in path:
            at = at.get(key) if isinstance(at, Mapping) else None
        if type(at) is not int or not 0 <= at <= size:
            raise ValueError(f"a state of a {kind} is at a number from 0 to {size} of its buffer, not at {at!r:.40}")


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """The state of a generator, with the number of children that `spawn` has made: it decides which come next."""
    state = dict(generator.bit_generator.state)
    return {**state, SPAWNED: int(_seeds_of(generator).n_children_spawned)} if counts_children(generator) else state


def counts_children(generator: np.random.Generator) -> bool:
    """Whether the state of a generator has the number of its children: its seeds are a SeedSequence of numpy."""
    return isinstance(_seeds_of(generator), np.random.SeedSequence)


def set_generator_state(generator: np.random.Generator, state: Any) -> None:
    """Set a generator to a state from a file, which isn't trusted. Without a number of children in it, as in numpy's
    own states, that number stays. Raises ValueError if it is no state of that kind of generator."""
    spawned = state.get(SPAWNED) if isinstance(state, Mapping) else None
    if spawned is None:
        _set_bits(generator, state)
        return
    seeds = _seeds_of(generator)
    if type(spawned) is not int or not 0 <= spawned <= _SPAWNED_MAX:
        raise ValueError(f"a generator has spawned 0 to {_SPAWNED_MAX} children, not {spawned!r:.40}")
    if not counts_children(generator):
        raise ValueError(f"it is that of a generator with a SeedSequence, and this one has a {type(seeds).__name__}")
    _set_bits(generator, {key: value for key, value in state.items() if key != SPAWNED})
    like: Any = np.random.SeedSequence(
        seeds.entropy, spawn_key=seeds.spawn_key, pool_size=seeds.pool_size, n_children_spawned=spawned
    )
    type(like).__setstate__(seeds, like.__reduce__()[2])  # as a pickle does: numpy has no other way to set the number


def _seeds_of(generator: np.random.Generator) -> Any:
    """What `spawn` makes the seeds of children of."""
    return parts_of_generator(generator)[1]


def parts_of_generator(generator: np.random.Generator | np.random.RandomState) -> list[Any]:
    """What a generator may share with another one: its bits, and the seeds of its children, which may be None."""
    bits: Any = generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator
    return [bits, bits.seed_seq if hasattr(bits, "seed_seq") else getattr(bits, "_seed_seq", None)]  # 2.0 has both


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    kind = type(generator.bit_generator).__name__
    if not isinstance(state, Mapping) or state.get("bit_generator") != kind:
        raise ValueError(f"it is to be the state of a {kind}")
    check_generator_state(kind, state)
    try:
        generator.bit_generator.state = state
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"it is no state of a {kind}: {error}") from error


def generator_parts(generator: np.random.Generator) -> list[Any]:
    """The state of a generator, and the seeds from which `spawn` makes its children; the seeds are None if it has
    none. Raises TypeError for bit generators and seeds of other packages, and for a pool_size that is too large.
    """
    bits: Any = generator.bit_generator
    kind = type(bits).__name__
    if kind not in _BIT_GENERATORS or bit_generator(kind) is not type(bits):
        raise TypeError(f"a store can't keep a generator over a {kind}, only over those of numpy")
    seeds = _seeds_of(generator)
    if seeds is None and type(bits) is np.random.MT19937:  # a RandomState's
        return [dict(bits.state), None]
    if type(seeds) is not np.random.SeedSequence:
        raise TypeError(f"a store can't keep a generator that was seeded with a {type(seeds).__name__}")
    if seeds.pool_size > _POOL_MAX:
        raise TypeError(
            f"a store can't keep a generator whose SeedSequence has a pool_size of {seeds.pool_size}, but at most "
            f"{_POOL_MAX}; numpy's default is 4"
        )
    entropy = seeds.entropy.tolist() if isinstance(seeds.entropy, np.ndarray) else seeds.entropy
    return [
        dict(bits.state),
        [entropy, list(seeds.spawn_key), int(seeds.pool_size), seeds.n_children_spawned],
    ]


def generator_of(parts: Any) -> np.random.Generator:
    """The generator of `generator_parts`, which are not trusted. Raises ValueError, TypeError or another error if they
    make none."""
    state, seeds = parts
    kind = bit_generator(state["bit_generator"])
    if seeds is None:
        bits = np.random.MT19937(0)
        bits._legacy_seeding(0)
    else:
        entropy, spawn_key, pool_size, children = seeds
        if type(pool_size) is not int or not 4 <= pool_size <= _POOL_MAX or type(children) is not int or children < 0:
            raise ValueError("the seeds of a generator break the format")
        bits = kind(
            np.random.SeedSequence(
                entropy, spawn_key=tuple(spawn_key), pool_size=pool_size, n_children_spawned=children
            )
        )
    generator = np.random.Generator(bits)
    _set_bits(generator, state)
    return generator
