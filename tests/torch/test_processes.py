"""Tensors over stores that torch.multiprocessing sends to other processes stay in their stores."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import pmstore
import pmstore.torch
from pmstore.torch import persist
from tests.conftest import run_in_fork
from tests.torch.nets import Net, build, contents, step, trained


def sent(value: Any) -> Any:
    """What a process receives to which a value is sent."""
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with pmstore.open(tmp_path / "x.pm") as opened:
        yield opened


WAYS: dict[str, Callable[[pmstore.Store], torch.Tensor]] = {
    "tensor": lambda store: pmstore.torch.tensor(store, "x"),
    "from_numpy": lambda store: torch.from_numpy(store["x"]),
    "a view": lambda store: pmstore.torch.tensor(store, "x")[1:, ::2],
    "from_numpy of a view": lambda store: torch.from_numpy(store["x"][2:]),
    "a transpose": lambda store: pmstore.torch.tensor(store, "x").T,
    "a parameter": lambda store: torch.nn.Parameter(pmstore.torch.tensor(store, "x")),
    "bfloat16": lambda store: pmstore.torch.tensor(store, "half"),
    "an empty one": lambda store: pmstore.torch.tensor(store, "empty"),
    "a number": lambda store: pmstore.torch.tensor(store, "number"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_tensor_that_was_sent_is_in_its_store_as_before(store: pmstore.Store, way: Any, tmp_path: Path) -> None:
    store["x"] = torch.arange(20.0).reshape(5, 4)
    store["half"] = torch.ones(3, dtype=torch.bfloat16)
    store["empty"] = torch.ones(0, 3)
    store["number"] = torch.tensor(7)
    store.commit()
    x = way(store)
    before = {name: pmstore.torch.tensor(store, name).clone() for name in store}
    copy = sent(x)
    assert type(copy) is type(x) and copy.dtype == x.dtype and copy.stride() == x.stride() and torch.equal(copy, x)
    with torch.no_grad():
        copy.add_(5)
        assert all(torch.equal(pmstore.torch.tensor(store, name), one) for name, one in before.items())
        with store.transaction():
            x.add_(1)
    changed = sum(int((pmstore.torch.tensor(store, name) == one + 1).sum()) for name, one in before.items())
    assert changed == x.numel()
    store.close()
    with pmstore.open(tmp_path / "x.pm", "r") as look:
        assert sum(int((pmstore.torch.tensor(look, name) == one + 1).sum()) for name, one in before.items()) == changed


def in_a_child(path: Path) -> None:
    with pmstore.open(path) as store:
        store["x"] = torch.zeros(3)
        x = pmstore.torch.tensor(store, "x")
        assert torch.equal(sent(x), x)
        x.fill_(1)
        assert store["x"].tolist() == [1, 1, 1]


def test_a_store_that_a_forked_process_opens_keeps_its_tensors(tmp_path: Path) -> None:
    run_in_fork(in_a_child, tmp_path / "child.pm")


def test_tensors_that_share_memory_do_so_where_they_arrive(store: pmstore.Store) -> None:
    store["x"] = torch.zeros(6)
    x = pmstore.torch.tensor(store, "x")
    first, last = sent([x[:4], x[2:]])
    first.fill_(1)
    assert last.tolist() == [1, 1, 0, 0] and not x.any()


def test_a_tensor_that_can_not_be_written_arrives_as_a_copy(store: pmstore.Store, tmp_path: Path) -> None:
    store["x"] = torch.arange(6.0)
    store["half"] = torch.ones(3, dtype=torch.bfloat16)
    store.commit()
    with pmstore.open(tmp_path / "x.pm", "r") as look:
        for name in look:
            x = pmstore.torch.tensor(look, name)
            copy = sent(x)
            assert type(x) is pmstore.torch.ReadOnlyTensor and type(copy) is torch.Tensor
            assert copy.dtype == x.dtype and torch.equal(copy, x) and bool((copy.add_(1) != x).all())
        x = pmstore.torch.tensor(look, "x")
        for one in (x, x.requires_grad_(), torch.nn.Parameter(x, False), torch.nn.Parameter(x)):
            copy = sent(one)
            assert copy.requires_grad == one.requires_grad and torch.equal(copy, x)
            assert isinstance(copy, torch.nn.Parameter) == isinstance(one, torch.nn.Parameter)


def test_a_training_whose_state_was_sent_is_stored(tmp_path: Path) -> None:
    """The state of the optimizer, the buffers and the parameters are sent after each step."""
    module, optimizer = build()
    with pmstore.open(tmp_path / "x.pm") as store:
        persist(module, optimizer, store)
        for number in range(3):
            step(module, optimizer, number)
            sent([optimizer.state_dict(), dict(module.named_buffers()), module.state_dict()])
    fresh, other = build(seed=1)
    with pmstore.open(tmp_path / "x.pm") as store:
        persist(fresh, other, store)
        assert contents(fresh, other) == trained("Adam", 3)


def test_a_buffer_that_was_moved_into_shared_memory_is_stored(tmp_path: Path) -> None:
    module = Net()
    with pmstore.open(tmp_path / "x.pm") as store:
        persist(module, None, store)
        for number in range(3):
            module.mean.share_memory_()
            with store.transaction():
                module.mean.fill_(number)
            assert store["module/mean"].tolist() == [number] * 4
        with store.transaction():
            module.mean.add_(1)
        assert store["module/mean"].tolist() == [3] * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_spawned_worker_gets_tensors_of_stores(store: pmstore.Store, tmp_path: Path) -> None:
    store["x"] = torch.arange(24.0).reshape(6, 4)
    store.commit()
    with pmstore.open(tmp_path / "x.pm", "r") as look:
        x = pmstore.torch.tensor(store, "x")
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, pmstore.torch.tensor(look, "x")),
            batch_size=3,
            num_workers=1,
            multiprocessing_context=multiprocessing.get_context("spawn"),
        )
        mine, theirs = (torch.cat(rows) for rows in zip(*loader))
        assert torch.equal(mine, x) and torch.equal(theirs, x)
    with store.transaction():
        x.zero_()
    assert not store["x"].any()
