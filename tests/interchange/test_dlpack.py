"""DLPack and the buffer protocol: live arrays are arrays of numpy, and consumers keep their memory valid."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pmstore

Open = Callable[..., pmstore.Store]


def torch_view(array: Any) -> Any:
    return importlib.import_module("torch").from_dlpack(array).numpy()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.from_dlpack,
    "memoryview": lambda array: np.asarray(memoryview(array)),
    "frombuffer": lambda array: np.frombuffer(array, array.dtype).reshape(array.shape),
    "torch": torch_view,
}


@pytest.fixture(params=sorted(VIEWS))
def view(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    if request.param == "torch":
        pytest.importorskip("torch")
    return VIEWS[request.param]


def test_a_consumer_shares_the_memory(open_store: Open, view: Callable[[Any], Any]) -> None:
    with open_store() as store:
        array = store.create_array("x", (50, 100))
        store.commit()
        shared = view(array)
        assert shared.ctypes.data == array.ctypes.data
        if shared.flags.writeable:
            shared[3] = 7
            store.commit()
            store.rollback()
            assert store["x"][3].tolist() == [7] * 100
    with open_store(mode="r", verify=True) as store:
        assert store["x"][3, 0] == (7 if shared.flags.writeable else 0)


def test_it_outlives_the_store(open_store: Open, view: Callable[[Any], Any]) -> None:
    """Never a signal: what the consumer writes after the store is closed is not in the store, as of any view."""
    store = open_store()
    shared = view(store.create_array("x", 200_000, fill_value=2.5))
    store["y"] = np.ones(200_000)
    gone = view(store["y"])
    del store["y"]
    store.close()
    del store
    gc.collect()
    assert shared.sum() == 500_000 and gone.sum() == 200_000
    if shared.flags.writeable:
        shared[:] = 1
        gone[:] = 1
    with open_store(verify=True) as store:
        assert store["x"].sum() == 500_000 and list(store) == ["x"]
        store["x"][:] = 3
        assert shared.sum() in (200_000, 500_000)


def test_it_outlives_a_rollback_and_growth(open_store: Open, view: Callable[[Any], Any]) -> None:
    with open_store() as store:
        with pytest.raises(ZeroDivisionError), store.transaction():
            shared = view(store.create_array("x", 100_000, fill_value=2))
            raise ZeroDivisionError
        kept = view(store.create_array("kept", 1000, fill_value=4))
        for i in range(20):
            store[f"large{i}"] = np.full(100_000, i)
        store.commit()
        assert shared.sum() == 200_000 and kept.sum() == 4000


@pytest.fixture(params=["constant", "snapshot", "closed"])
def fixed(request: pytest.FixtureRequest, open_store: Open) -> Iterator[tuple[Any, Callable[[], None]]]:
    """An array of 100,000 threes that is not writeable, and a function that commits, if the store is open, and closes.
    Afterwards the store has the same array."""
    store = open_store()
    store.create_array("x", 100_000, fill_value=3, writeable=request.param != "constant")
    store.commit()
    reader = pmstore.open(store.path, "r") if request.param == "snapshot" else store
    array = reader["x"]
    if request.param == "closed":
        store.close()

    def close() -> None:
        if request.param != "closed":
            store.commit()
        reader.close()
        store.close()

    yield array, close
    with open_store(verify=True) as store:
        assert store["x"].tolist() == [3.0] * 100_000 and store.check().ok


def test_what_is_not_writeable_stays_so(fixed: tuple[Any, Callable[[], None]]) -> None:
    array, close = fixed
    assert not array.flags.writeable and memoryview(array).readonly
    shared = np.from_dlpack(array)
    assert not shared.flags.writeable
    for one in (array, shared):
        with pytest.raises(ValueError):
            one[0] = 1
    with pytest.raises(BufferError):  # the older protocol has no flag for it, and numpy refuses
        array.__dlpack__()
    close()


@pytest.mark.filterwarnings("ignore:.*not writable")
def test_torch_ignores_the_flag_and_the_store_does_not_change(fixed: tuple[Any, Callable[[], None]]) -> None:
    """torch has no tensors that can't be written. What it writes is never committed, and never a signal."""
    torch = pytest.importorskip("torch")
    array, close = fixed
    try:
        tensor = torch.from_dlpack(array)
    except (BufferError, RuntimeError):  # a version that refuses
        close()
        return
    tensor[:] = 1
    close()
    tensor[:] = 2
