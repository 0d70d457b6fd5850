"""Modules and optimizers that don't fit what is in the store, or are not in it any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
import pmstore.torch
from pmstore.torch import GradLog, persist
from tests.torch.nets import Net, build, contents, step, trained

Open = Callable[..., pmstore.Store]


def changed(change: Callable[[Net], object]) -> Net:
    module = Net()
    change(module)
    return module


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m, "extra", nn.Linear(1, 1)), "the store has no 'extra.weight'"),
        (lambda m: delattr(m, "frozen"), "the module has no 'frozen.weight', which is in the store"),
        (
            lambda m: setattr(m, "frozen", nn.Linear(4, 5)),
            r"'frozen.weight' is of shape \(5, 4\) and dtype float32 in the module and of shape \(4, 4\)",
        ),
        (lambda m: m.norm.double(), "'norm.weight' is of shape .* float64 in the module and .* float32 in the store"),
        (
            lambda m: setattr(m.out, "weight", nn.Parameter(torch.zeros(7, 4))),
            "'out.weight' and 'embed.weight' are one tensor only in the store",
        ),
        (
            lambda m: setattr(m.frozen, "bias", m.norm.bias),
            "'frozen.bias' and 'norm.bias' are one tensor only in the module",
        ),
    ],
)
def test_another_module(open_store: Open, change: Any, text: str) -> None:
    store = open_store()
    module, optimizer = build()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    store.commit()
    other = changed(change)
    before = contents(other, None)
    with pytest.raises(pmstore.FingerprintMismatchError, match=text) as error:
        persist(other, torch.optim.Adam(other.parameters()), store)
    assert "store.group(name)" in str(error.value) and contents(other, None) == before
    persist(other, None, store.group("other"))
    step(module, optimizer, 1)
    store.commit()
    assert contents(module, optimizer) == trained("Adam", 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "a torch.optim.adam.Adam, and not a torch.optim.sgd.SGD"),
        (lambda m: torch.optim.Adam([{"params": [p]} for p in m.parameters()]), "it has 1 groups .* has 5"),
        (
            lambda m: torch.optim.Adam([*m.norm.parameters(), m.embed.weight]),
            "its group 0 has 'embed.weight' where the one that is given has 'norm.weight'",
        ),
        (lambda m: torch.optim.Adam([m.embed.weight]), "its group 0 has 'norm.weight' where .* has no more parameters"),
    ],
)
def test_another_optimizer(store: pmstore.Store, make: Any, text: str) -> None:
    persist(*build(), store)
    module = Net()
    with pytest.raises(pmstore.FingerprintMismatchError, match=text):
        persist(module, make(module), store)


class Divided(torch.optim.Optimizer):
    """Its state is in another optimizer, as that of a ZeroRedundancyOptimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.optim = torch.optim.Adam(self.param_groups)

    def step(self, closure: Any = None) -> None:
        self.optim.step()


def test_an_optimizer_with_one_of_other_parameters(store: pmstore.Store) -> None:
    module, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.helper = torch.optim.SGD(other.parameters(), 0.1)  # type: ignore[attr-defined]
    assert not persist(module, optimizer, store).resumed


def test_what_persist_can_not_keep(store: pmstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = build()
    for wrong, text in (
        (lambda: persist(3, None, store), "module is a torch.nn.Module"),
        (lambda: persist(module, store, optimizer), "store is a Store or a Group"),
        (lambda: persist(module, 3, store), "optimizer is a torch.optim.Optimizer"),
        (lambda: persist(module, torch.optim.LBFGS(module.parameters()), store), "LBFGS"),
        (lambda: persist(module, Divided(module.parameters()), store), "Divided: .* its attribute 'optim'"),
    ):
        with pytest.raises(TypeError, match=text):
            wrong()
    overlapping = nn.Module()
    memory = torch.zeros(10)
    overlapping.a, overlapping.b = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    other = nn.Linear(3, 3)
    for wrong, text in (
        (lambda: persist(nn.Linear(3, 3, device="meta"), None, store), "'weight' is on meta.*module.cpu"),
        (lambda: persist(nn.LazyLinear(3), None, store), "'weight' has no shape yet"),
        (lambda: persist(overlapping, None, store), "'b' shares a part of its memory with 'a'"),
        (lambda: persist(module, torch.optim.SGD(other.parameters()), store), r"parameter of shape \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=text):
            wrong()
    sparse = nn.Module()
    sparse.a = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="layout torch.sparse_coo"):
        persist(sparse, None, store)
    assert not len(store)
    store["module/config"] = 3
    with pytest.raises(pmstore.NameConflictError, match="which already has 'config'; another training needs a group"):
        persist(module, optimizer, store)
    del store["module/config"]
    optimizer.param_groups[0]["function"] = print
    with pytest.raises(TypeError, match="can't keep the optimizer's hyperparameters"):
        persist(module, optimizer, store)
    assert not len(store)


def test_a_store_that_is_only_read(open_store: Open) -> None:
    module, optimizer = build()
    persist(module, optimizer, open_store())
    with open_store(mode="r") as look:
        other = Net()
        with pytest.raises(pmstore.ReadOnlyStoreError, match="load_state_dict"):
            persist(other, None, look)
        other.load_state_dict(pmstore.torch.state_dict(look.group("module")), strict=False)
        assert torch.equal(other.embed.weight, module.embed.weight)


def test_a_full_store_keeps_what_it_has(open_store: Open) -> None:
    store = open_store(max_size=3 << 20)
    large = nn.Linear(1000, 1000)
    with pytest.raises(pmstore.OutOfSpaceError):
        persist(large, None, store)
    store.commit()
    assert not len(store) and store.check().ok
    small = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(small.parameters())
    persist(small, optimizer, store)
    with pytest.raises(pmstore.OutOfSpaceError):
        for number in range(100):
            store[f"filler/{number}"] = np.zeros(20_000)
    store.commit()
    small(torch.ones(300)).sum().backward()
    optimizer.step()
    with pytest.raises(pmstore.OutOfSpaceError):  # for the optimizer's state
        store.commit()
    store.rollback()
    store.group("filler").clear()
    store.commit()
    optimizer.step()
    store.commit()
    assert store["optimizer/weight/step"] == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_part_that_lies_in_a_store_already(open_store: Open, together: bool) -> None:
    module, optimizer = build()
    store = open_store()
    persist(module, optimizer, store.group("one"))
    with pmstore.open(":memory:") as second:
        other = nn.Sequential(nn.Linear(4, 4), module.embed)
        with pytest.raises(ValueError, match="'1.weight' of the module lies in .*'one'.* one module that has both"):
            persist(other, None, (store if together else second).group("other"))
        assert not len(second) and "other" not in store
    step(module, optimizer, 0)
    store.commit()
    assert contents(module, optimizer) == trained("Adam", 1)
    store.close()
    persist(other, None, open_store().group("other"))


# ---- what happens to a module that is in a store


def test_after_close_a_step_raises(open_store: Open) -> None:
    store = open_store()
    module, optimizer = build()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    store.close()
    kept = contents(module, optimizer)
    with pytest.raises(pmstore.ClosedStoreError, match="call persist again"):
        step(module, optimizer, 1)
    module.mean = torch.zeros(4)
    free = copy.deepcopy(module)
    step(free, torch.optim.SGD(free.parameters()), 1)
    persist(module, optimizer, open_store())
    assert contents(module, optimizer) == kept
    step(module, optimizer, 1)
    assert contents(module, optimizer) == trained("Adam", 2)


MOVES: dict[str, tuple[Callable[[Net], object], str]] = {
    "half": (lambda m: m.half(), "'mean' .* dtype float16 now, and .* float32 in the store"),
    "to": (lambda m: m.embed.to(torch.float64), "'embed.weight' .* float64"),
    "meta": (lambda m: m.frozen.to("meta"), "'frozen.weight' .* is on meta"),
    "data": (lambda m: setattr(m.embed.weight, "data", torch.zeros(7, 4)), "'embed.weight' .* has other memory now"),
    "transposed": (lambda m: setattr(m.frozen.weight, "data", m.frozen.weight.data.t()), "'frozen.weight' .* strides"),
    "fewer rows": (lambda m: setattr(m.embed.weight, "data", m.embed.weight.data[:2]), r"'embed.weight' .* \(2, 4\)"),
    "a parameter": (lambda m: setattr(m.frozen, "bias", nn.Parameter(torch.ones(4))), "'frozen.bias' .* replaced by"),
    "share_memory": (lambda m: m.share_memory(), "'embed.weight' .* other memory"),
    "deleted": (lambda m: setattr(m.frozen, "bias", None), "'frozen.bias' .* was deleted"),
    "another layer": (lambda m: setattr(m, "norm", nn.BatchNorm1d(4)), "other modules inside"),
    "a new layer": (lambda m: setattr(m, "new", nn.Linear(1, 1)), "other modules inside"),
    "a new parameter": (lambda m: m.frozen.register_parameter("x", nn.Parameter(torch.ones(1))), "other tensors"),
    "a parameter in an empty place": (lambda m: setattr(m.out, "bias", nn.Parameter(torch.ones(7))), "other tensors"),
    "a buffer of another shape": (lambda m: setattr(m, "mean", torch.zeros(5)), r"'mean' .* of shape \(5,\)"),
    "assign": (lambda m: m.load_state_dict(Net().state_dict(), assign=True), "replaced by another"),
}


@pytest.mark.parametrize(("move", "text"), MOVES.values(), ids=list(MOVES))
def test_a_module_that_is_not_in_the_store_any_more(store: pmstore.Store, move: Any, text: str) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)
    before = store.sequence
    move(module)
    with pytest.raises(pmstore.DetachedError, match=text):
        optimizer.step()
    with pytest.raises(pmstore.DetachedError, match=text):
        store.commit()
    with pytest.raises(pmstore.DetachedError, match=text), store.transaction():
        pass
    assert store.sequence == before
    del module, optimizer
    store.rollback()
    store.commit()


@pytest.mark.parametrize("many", [1, 2])
def test_tied_buffers_that_part(store: pmstore.Store, many: int) -> None:
    """A store has one array for both. Equal values are taken, as of caches that each layer computes for itself."""
    net = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
    for part, mean in zip(net, [torch.zeros(2)] * 2):
        part.register_buffer("mean", mean)
    persist(net, None, store)
    for part in net:
        part.mean = 0.5 * part.mean + 1
    store.commit()
    assert store["module/0.mean"].tolist() == [1, 1]
    for number, part in enumerate(net[:many]):
        part.mean = part.mean + number + 1
    with pytest.raises(pmstore.DetachedError, match="'0.mean' and '1.mean' of the module were one tensor at persist"):
        store.commit()
    assert [part.mean.tolist() for part in net] == [[2, 2], [3, 3] if many == 2 else [1, 1]]
    store.rollback()
    assert [part.mean.tolist() for part in net] == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.rename("module", "old"),
        lambda store: store.clear(),
        lambda store: store.__setitem__("module/embed.weight", np.zeros(3)),
    ],
)
def test_names_that_are_gone_in_the_store(store: pmstore.Store, change: Any) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)
    change(store)
    with pytest.raises(pmstore.DetachedError, match="was deleted, replaced or renamed"):
        for _ in range(20):  # each looks at one array
            store.commit()
    store.rollback()
    step(module, optimizer, 0)
    store.commit()
    assert contents(module, optimizer) == trained("Adam", 1)
    for name, parameter in module.named_parameters():
        assert parameter.data_ptr() == store.group("module")[name].ctypes.data


@pytest.mark.parametrize(
    "change", [lambda store: store.group("optimizer").clear(), lambda store: store.rename("optimizer", "old")]
)
def test_state_of_the_optimizer_that_the_program_deletes(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Commits notice it, as that of a module: each looks at one of the tensors."""
    module, optimizer = build("Adam")
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(module, optimizer, store)
        step(module, optimizer, 1)
        store.commit()
        change(store)
        with pytest.raises(pmstore.DetachedError, match="of the optimizer's state was deleted, replaced or renamed"):
            for number in range(200):
                step(module, optimizer, number)
                store.commit()
        store._drop()


class Counting(nn.Module):
    """A module that keeps a number in a way of its own."""

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.inside, self.calls = nn.Linear(4, 4), calls

    def _save_to_state_dict(self, found: Any, prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep)
        found[f"{prefix}calls"] = torch.tensor(self.calls)


class Hooked(nn.Linear):
    """A module with a hook that adds a number of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self._register_state_dict_hook(lambda self, found, prefix, _: found.update({f"{prefix}calls": self.calls}))


class Overriding(nn.Linear):
    """A module with a state_dict() of its own, as metrics have."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        found[f"{options.get('prefix', '')}calls"] = torch.tensor(self.calls)
        return found


class Renaming(nn.Linear):
    def _save_to_state_dict(self, found: Any, prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep)
        found[f"{prefix}kernel"] = found.pop(f"{prefix}weight")


class FalseExtra(nn.Linear):
    """A module whose hook uses a key of torch's, without what it stands for."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_state_dict_hook(lambda self, found, prefix, _: found.update({f"{prefix}_extra_state": 7}))


class Nested(nn.Module):
    """A module whose state_dict() has another one's inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"model": self.inner.state_dict()}


class Refusing(Nested):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("on rank 0 only")


class Silent(Nested):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return None


class Empty(nn.Linear):
    """A module with a buffer without elements, under another key."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("none", torch.empty(0))
        self._register_state_dict_hook(lambda _, found, prefix, __: found.update(nothing=found.pop(f"{prefix}none")))


@pytest.mark.parametrize("kind", [Nested, Refusing, Silent, Empty])
def test_a_module_whose_state_dict_is_unusual(kind: Any, tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        net = kind()
        persist(net, torch.optim.SGD(net.parameters()), store)
        assert len(store.group("module")) == len(dict(net.named_parameters())) + (kind is Empty)


@pytest.mark.parametrize("kind", [Counting, Hooked, Overriding, FalseExtra])
def test_what_a_module_adds_to_its_state_dict_itself(kind: Any, tmp_path: Path) -> None:
    net = nn.Sequential(kind())
    with pmstore.open(tmp_path / "a.pm") as store:
        with pytest.raises(TypeError, match=r"^persist can't keep '0\.\w+', which state_dict\(\) has .* a buffer"):
            persist(net, None, store)
        with pytest.raises(TypeError, match=r"^GradLog can't keep '0\.\w+', which state_dict\(\) has .* a buffer"):
            GradLog(net, torch.optim.SGD(net.parameters()), store)
        assert len(store) == 0


def test_a_module_that_renames_what_its_state_dict_has(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "a.pm") as store:
        persist(nn.Sequential(Renaming(2, 2)), None, store)
        assert "module/0.weight" in store


class Averaging(torch.optim.SGD):
    """An optimizer with an average that only its state_dict() has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": [torch.ones(2)]}


def test_what_an_optimizer_adds_to_its_state_dict_itself(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with pmstore.open(tmp_path / "a.pm") as store:
        with pytest.raises(TypeError, match=r"'average', which the state_dict\(\) of Averaging has .* attribute state"):
            persist(net, Averaging(net.parameters(), 0.1), store)
        assert len(store) == 0


def test_torch_script(tmp_path: Path) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4))
    with pmstore.open(tmp_path / "a.pm") as store:
        for module, what in (
            (torch.jit.script(net), "a module"),
            (nn.Sequential(torch.jit.script(net)), "the module '0'"),
        ):
            with pytest.raises(TypeError, match=f"persist can't keep {what} of TorchScript"):
                persist(module, None, store)
        persist(net, None, store)
        torch.jit.script(net)(torch.ones(2, 4))
        store.commit()
        assert store["module/0.running_mean"].tolist() == net[0].running_mean.tolist() != [0.0] * 4


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one that does without the base class, as many do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def test_optimizers_that_can_not_be_kept(tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with pmstore.open(tmp_path / "a.pm") as store:
        with pytest.raises(TypeError, match=r"can't keep a Wrapped, .* to call that of torch\.optim\.Optimizer"):
            persist(net, Wrapped(sgd), store)
        assert len(store) == 0
        sgd.state[net.weight]["a/b"] = torch.zeros(1)
        with pytest.raises(TypeError, match="state of 'weight': its name 'a/b' has a '/'"):
            persist(net, sgd, store)
        assert len(store) == 0
