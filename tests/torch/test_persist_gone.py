"""A module and an optimizer that are gone before the commit: it has what they were at last."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
from pmstore.torch import persist
from tests.torch.training import equal


class Net(nn.Linear):
    """A layer with a buffer that a forward pass replaces, and an extra state."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Counter:
    """An object without a reference to itself."""

    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def train(store: pmstore.Store, until: int, every: int, kept: list[Any], scheduled: bool = False) -> dict[str, Any]:
    """The state at the end. Nothing outlives the call but what has one of the types in `kept`, which then holds it."""
    torch.manual_seed(0)
    net, counter = Net(), Counter()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    also: dict[str, Any] = {"counter": counter}
    if scheduled:
        also["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    kept[:] = [one for one in (net, optimizer) if type(one) in kept]
    persist(net, optimizer, store, also=also)
    while net.calls < until:
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 12).view(3, 4) + net.calls).pow(2).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        counter.number += 1
        if scheduled:
            also["scheduler"].step()
        if every and net.calls % every == 0:
            store.commit()
    assert counter.number == until
    return {name: one.state_dict() for name, one in {"net": net, "optimizer": optimizer, **also}.items()}


@pytest.mark.parametrize("kept", [[], [Net], [torch.optim.AdamW], [Net, torch.optim.AdamW]])
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_commit_after_they_are_gone(kept: list[Any], every: int, scheduled: bool, tmp_path: Path) -> None:
    """A with statement makes one when it is left, around the call of a function that trains."""
    with pmstore.open(tmp_path / "whole.pm") as store:
        whole = train(store, 9, every, [], scheduled)
    for until in (4, 4, 9):
        held = list(kept)
        with pmstore.open(tmp_path / "parts.pm") as store:
            parts = train(store, until, every, held, scheduled)
    assert equal(parts, whole)


def test_a_rollback_after_they_are_gone(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        train(store, 4, 3, [])
        store.rollback()
        store["x"] = 1
    with pmstore.open(tmp_path / "b.pm") as store:
        train(store, 3, 3, [])
    with pmstore.open(tmp_path / "a.pm") as one, pmstore.open(tmp_path / "b.pm") as other:
        assert equal(train(one, 3, 0, []), train(other, 3, 0, []))


def test_a_container_that_is_gone(tmp_path: Path) -> None:
    """The parts and the optimizer are not."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(nn.ModuleDict({"net": net}), optimizer, store)
        for calls in range(1, 4):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 / calls
            store.commit()
            assert store["module/net.mean"][0] == net.mean[0] == 2 - 0.5 ** (calls - 1)
            assert store["training/optimizer/hyperparameters"][0]["lr"] == 0.1 / calls
        optimizer.param_groups[0]["lr"] = 0.5
        persist(net, optimizer, store.group("part"))  # which ends the other one, with what it has now
        assert store["training/optimizer/hyperparameters"][0]["lr"] == 0.5
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        store.commit()
        assert store["part/module/bias"] != store["module/net.bias"]


def test_parts_of_a_container_that_is_gone_are_watched(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(nn.ModuleDict({"net": net}), optimizer, store.group("fit"))
        store.group("part/module")["x"] = 1
        with pytest.raises(pmstore.NameConflictError):
            persist(net, None, store.group("part"))  # which leaves all as it was
        optimizer.param_groups[0]["lr"] = 0.5
        store.commit()
        assert store["fit/training/optimizer/hyperparameters"][0]["lr"] == 0.5
        store.group("fit").clear()
        with pytest.raises(pmstore.DetachedError, match="was deleted, replaced or renamed"):
            store.commit()
        store.rollback()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        store.commit()
        net.load_state_dict(Net().state_dict(), assign=True)
        with pytest.raises(pmstore.DetachedError, match="was replaced by another parameter"):
            store.commit()
        store.rollback()


def test_a_store_that_nobody_closes(tmp_path: Path) -> None:
    store = pmstore.open(tmp_path / "a.pm")
    train(store, 4, 3, [])
    with pytest.warns(pmstore.UncommittedChangesWarning):
        del store
        gc.collect()
    with pmstore.open(tmp_path / "a.pm") as store:
        train(store, 4, 3, [])


def halved(net: nn.Module, store: pmstore.Store) -> None:
    net.half()


def deleted(net: nn.Module, store: pmstore.Store) -> None:
    store.group("fit").clear()


def replaced(net: nn.Module, store: pmstore.Store) -> None:
    net[0] = nn.Linear(4, 1)  # type: ignore[index]


@pytest.mark.parametrize("spoil", [halved, deleted, replaced])
def test_what_nobody_can_mend_stops_no_commit(spoil: Any, tmp_path: Path) -> None:
    def call(store: pmstore.Store) -> None:
        net = nn.Sequential(nn.Linear(4, 1))
        net[0].register_buffer("mean", torch.zeros(2))
        optimizer = torch.optim.Adam(net.parameters())
        persist(net, optimizer, store.group("fit"))
        net(torch.ones(4)).backward()
        optimizer.step()
        net[0].mean = torch.ones(2)
        spoil(net, store)

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        store["score"] = 1
        with contextlib.nullcontext() if spoil is deleted else pytest.warns(pmstore.LostUpdateWarning):
            store.commit()
        assert ("fit" in store) == (spoil is not deleted)
        store["score"] = 2
    with pmstore.open(tmp_path / "a.pm") as store:
        assert store["score"] == 2
        if spoil is not deleted:
            assert store["fit/optimizer/0.weight/step"] == 1
            assert store["fit/module/0.mean"].tolist() == ([0, 0] if spoil is halved else [1, 1])  # half() took it


class Average:
    """An object that needs the module for its state."""

    def __init__(self, net: nn.Module) -> None:
        self.net = weakref.proxy(net)

    def state_dict(self) -> dict[str, int]:
        return {"features": self.net.in_features}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Broken(Counter):
    """An object that can't give its state any more, or take it."""

    def state_dict(self) -> dict[str, int]:
        if self.number:
            raise RuntimeError("no state any more")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("no state is taken")


def test_what_needs_the_module_has_it(tmp_path: Path) -> None:
    def call(store: pmstore.Store) -> None:
        net = nn.Linear(4, 1)
        persist(net, None, store, also={"average": Average(net)})
        net.in_features = 5

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        gc.collect()
        store.commit()
        assert store["training/also/average"] == {"features": 5}


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_last_state_that_can_not_be_taken_is_told_of(collected: bool, again: bool, tmp_path: Path) -> None:
    def call(store: pmstore.Store) -> None:
        net, broken = nn.Linear(4, 1), Broken()
        persist(net, torch.optim.SGD(net.parameters()), store, also={"broken": broken})
        broken.number = 1

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        if collected:
            gc.collect()
        net = nn.Linear(4, 1)
        if again:
            persist(net, torch.optim.SGD(net.parameters()), store, also={"broken": Counter()})
        store["score"] = 1
        with pytest.warns(pmstore.LostUpdateWarning, match=r"not all of its last state .*\(RuntimeError: no state any"):
            store.commit()
        store["score"] = 2
        store.commit()
        assert store["training/also/broken"] == {"number": 0}


def test_a_rollback_raises_no_error_of_what_is_gone(tmp_path: Path) -> None:
    def call(store: pmstore.Store) -> None:
        net = nn.Linear(4, 1)
        persist(net, torch.optim.SGD(net.parameters()), store, also={"broken": Broken()})

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        with pytest.raises(ZeroDivisionError), store.transaction():
            raise ZeroDivisionError
        store.commit()


def more_layers(net: Any) -> None:
    net.head = nn.Linear(4, 3)


def more_buffers(net: Any) -> None:
    net.register_buffer("extra", torch.ones(3))


def fewer_buffers(net: Any) -> None:
    del net.mean


def parted(net: Any) -> None:
    net.mean = torch.ones(4)
    net.same = torch.zeros(4)


@pytest.mark.parametrize("change", [more_layers, more_buffers, fewer_buffers, parted])
@pytest.mark.parametrize("cycle", [False, True])
def test_changes_that_are_not_stored_are_told_of(change: Any, cycle: bool, tmp_path: Path) -> None:
    def call(store: pmstore.Store) -> None:
        net = Net()
        net.register_buffer("same", net.mean)
        if cycle:
            net.register_forward_hook(lambda *_: net.eval())  # type: ignore[func-returns-value]
        persist(net, None, store.group("fit"))
        change(net)

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        store["score"] = 1
        with pytest.warns(pmstore.LostUpdateWarning, match="the Net of .* is gone, and not all of its last state"):
            store.commit()
    with pmstore.open(tmp_path / "a.pm") as store:
        assert store["score"] == 1


def test_optimizers_beside_a_container_that_is_gone(tmp_path: Path) -> None:
    """The optimizers are those of a generator and a discriminator, for example."""

    def fit(path: Path, until: int) -> dict[str, Any]:
        torch.manual_seed(0)
        parts = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.Adam(part.parameters(), 0.1) for part in parts]
        with pmstore.open(path) as store:
            persist(nn.ModuleList(parts), None, store, also={f"o{i}": one for i, one in enumerate(optimizers)})
            store.setdefault("step", 0)
            while store["step"] < until:
                with store.transaction():
                    nn.Sequential(*parts)(torch.ones(4) * store["step"]).backward()
                    for one in optimizers:
                        one.step()
                        one.zero_grad()
                    store["step"] += 1
            return parts[0].state_dict()

    fit(tmp_path / "parts.pm", 3)
    assert equal(fit(tmp_path / "parts.pm", 6), fit(tmp_path / "whole.pm", 6))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("end", [pmstore.Store.commit, pmstore.Store.rollback])
def test_a_store_lets_many_go(scheduled: bool, end: Any, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        for number in range(20):
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            persist(net, optimizer, store.group(f"g{number}"), also={"s": scheduler} if scheduled else None)
        gone = [weakref.ref(one) for one in (net, optimizer, scheduler)]
        del net, optimizer, scheduler
        end(store)
        last = nn.Linear(4, 1)
        persist(last, None, store.group("last"))
        gc.collect()
        assert [one() for one in gone] == [None] * 3
        assert len(store._commits.followed()) == 1


@pytest.mark.parametrize("where", ["hook of a part", "hook of the optimizer", "also"])
def test_a_module_that_holds_itself_goes_with_the_next_one(where: str, tmp_path: Path) -> None:
    def call(group: pmstore.Group) -> Any:
        net = nn.Sequential(nn.Linear(4, 1))
        optimizer, counter = torch.optim.SGD(net.parameters(), 0.1), Counter()
        if where == "hook of a part":
            net[0].register_forward_hook(lambda *_: net.eval())  # type: ignore[func-returns-value]
        elif where == "hook of the optimizer":
            optimizer.register_step_post_hook(lambda *_: net.eval())  # type: ignore[arg-type, return-value]
        else:
            vars(counter)["net"] = net
        persist(net, optimizer, group, also={"counter": counter})
        return weakref.ref(net)

    with pmstore.open(tmp_path / "a.pm") as store:
        gone = []
        for number in range(8):
            gone.append(call(store.group(f"{number}")))
            store.commit()
            assert [one() for one in gone[:-1]] == [None] * number
        for number in range(8):
            with store.transaction():
                gone += [call(store.group(f"{number}/{i}")) for i in range(4)]
        assert sum(one() is not None for one in gone) <= 8


def test_modules_that_are_equal_are_not_the_same(tmp_path: Path) -> None:
    class Equal(Net):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    nets = Equal(), Equal()
    with pmstore.open(tmp_path / "a.pm") as store:
        for number, net in enumerate(nets):
            persist(net, None, store.group(f"net{number}"))
        for net in nets:
            net(torch.ones(1, 4))
        store.commit()
        assert [store[f"net{number}/module/mean"].tolist() for number in range(2)] == [[1] * 4] * 2


def test_copies_of_a_module_have_no_store(tmp_path: Path) -> None:
    net = nn.Sequential(Net())
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(net, None, store)
        for number, one in enumerate((copy.deepcopy(net), pickle.loads(pickle.dumps(net)))):
            one.half()
            store.commit()
            persist(one.float(), None, store.group(f"copy{number}"))
    assert not any(name.startswith("_pm") for part in net.modules() for name in vars(part))


def test_a_module_alone_keeps_its_store(tmp_path: Path) -> None:
    net = Net()
    persist(net, None, pmstore.open(tmp_path / "a.pm"))
    gc.collect()
    with torch.no_grad():
        net.weight.fill_(3)
    with pmstore.open(tmp_path / "a.pm") as store:
        store.commit()
        assert (store["module/weight"] == 3).all()
        store.close()


def test_a_class_of_a_module_gets_no_subclasses(tmp_path: Path) -> None:
    known = []

    class Registered(Net):
        def __init_subclass__(cls, *, tag: str) -> None:
            known.append(tag)

    def call(store: pmstore.Store) -> None:
        net = Registered()
        persist(net, None, store)
        net(torch.ones(1, 4))

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        gc.collect()
        store.commit()
        assert store["training/also/_extra_state"] == {"extra": 1} and not known and not Registered.__subclasses__()


@pytest.mark.parametrize(("verb", "kept"), [("rename", False), ("copy", False), ("copy", True)])
@pytest.mark.parametrize("inside", [False, True])
def test_another_name_has_the_last_state(verb: str, inside: bool, kept: bool, tmp_path: Path) -> None:
    """The state of the best epoch, for example: ``store.copy("fit", "best")`` after a step."""
    nets = []

    def call(store: pmstore.Store) -> None:
        net, counter = Net(), Counter()
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        persist(net, optimizer, store.group("fit"), also={"counter": counter})
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"], counter.number = 0.5, 3
        if kept:
            nets.append(net)

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        with store.transaction() if inside else contextlib.nullcontext():
            getattr(store, verb)("fit", "best")
            assert store["best/module/mean"].tolist() == [1] * 4
            assert store["best/training/optimizer/hyperparameters"][0]["lr"] == 0.5
            assert store["best/training/also/counter"] == {"number": 3}
            assert store["best/training/also/_extra_state"] == {"extra": 1}
            assert store["best/optimizer/weight/step"] == 1


class Bundle(nn.Module):
    """A container with the extra state of its parts."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def get_extra_state(self) -> Any:
        return self.net.calls

    def set_extra_state(self, state: Any) -> None:
        self.net.calls = state


def test_the_extra_state_of_a_container_that_is_gone(tmp_path: Path) -> None:
    net = Net()
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(Bundle(net), None, store)
        for calls in range(1, 4):
            net(torch.ones(1, 4))
            store.commit()
            assert store["training/also/_extra_state"] == store["training/also/net._extra_state"] == {"extra": calls}


def test_an_interrupt_while_garbage_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store keeps what it kept."""

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    def call(store: pmstore.Store) -> None:
        nets = Counter(), nn.Linear(4, 1), nn.Linear(4, 1)
        for number, net in enumerate(nets[1:]):
            persist(net, None, store.group(f"{number}"), also={"counter": nets[0]})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(gc, "collect", interrupt)
            others = [nn.Linear(4, 1) for _ in range(9)]
            for number, net in enumerate(others):
                persist(net, None, store.group(f"other/{number}"))
        nets[0].number = 5

    with pmstore.open(tmp_path / "a.pm") as store:
        call(store)
        store.commit()
        assert store["0/training/also/counter"] == store["1/training/also/counter"] == {"number": 5}


def test_a_thread_that_copies_does_not_wait_for_a_transaction(tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(net, None, store.group("fit"))
        with store.transaction():
            thread = threading.Thread(target=store.copy, args=("fit", "best"), daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
        assert (store["best/module/weight"] == net.state_dict()["weight"].numpy()).all()


def test_a_persist_that_was_rolled_back_keeps_no_store(tmp_path: Path) -> None:
    net = nn.Linear(4, 1)
    store = pmstore.open(tmp_path / "a.pm")
    with contextlib.suppress(ZeroDivisionError), store.transaction():
        persist(net, None, store)
        raise ZeroDivisionError
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None and net.weight.shape == (1, 4)
