"""A module and its optimizer in a store."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmstore
import pmstore.torch
from pmstore.torch import persist
from tests.conftest import Medium, run_in_fork

Open = Callable[..., pmstore.Store]


class Net(nn.Module):
    """Tied weights, a frozen layer, BatchNorm, a buffer that each call replaces, a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x).mean(1))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.out(self.frozen(hidden) + self.mean)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, foreach=False),
    "fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "a tensor as rate": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def build(name: str = "Adam", seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = Net()
    return module, OPTIMIZERS[name](module.parameters())


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step, on the batch with this number."""
    x = torch.from_numpy(np.random.default_rng(number).integers(0, 7, (8, 3)))
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x), x[:, 0]).backward()
    optimizer.step()


def contents(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """All state, as bytes and numbers that can be compared."""
    state = [module.state_dict(), {} if optimizer is None else optimizer.state_dict()]
    return torch.utils._pytree.tree_map(
        lambda x: (str(x.dtype), x.tolist(), bytes(x.numpy())) if isinstance(x, torch.Tensor) else x, state
    )


def trained(name: str, steps: int) -> Any:
    """The contents after steps without a store."""
    module, optimizer = build(name)
    for number in range(steps):
        step(module, optimizer, number)
    return contents(module, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_goes_on_with_the_same_bits(open_store: Open, name: str) -> None:
    store = open_store()
    module, optimizer = build(name)
    assert not persist(module, optimizer, store).resumed
    for number in range(3):
        step(module, optimizer, number)
        store.commit()
    assert contents(module, optimizer) == trained(name, 3)
    store.close()
    store = open_store()
    module, optimizer = build(name, seed=1)
    assert persist(module, optimizer, store).resumed and contents(module, optimizer) == trained(name, 3)
    for number in range(3, 6):
        with store.transaction():
            step(module, optimizer, number)
    assert contents(module, optimizer) == trained(name, 6)
    assert store.check().ok


def test_what_is_in_the_store(store: pmstore.Store) -> None:
    module, optimizer = build()
    persisted = persist(module, optimizer, store)
    assert persisted.store is store and persisted.module is module and persisted.optimizer is optimizer
    step(module, optimizer, 0)
    store.commit()
    assert sorted(store.group("module")) == sorted({*module.state_dict()} - {"out.weight"})
    assert sorted(store.group("optimizer/embed.weight")) == ["exp_avg", "exp_avg_sq", "step"]
    assert not list(store.group("optimizer/frozen.weight"))
    embed = pmstore.torch.tensor(store, "module/embed.weight")
    assert embed.data_ptr() == module.embed.weight.data_ptr() == module.out.weight.data_ptr()
    assert (
        optimizer.state[module.embed.weight]["exp_avg"].data_ptr()
        == store["optimizer/embed.weight/exp_avg"].ctypes.data
    )
    assert store["training/optimizer/hyperparameters"][0]["lr"] == 0.01
    assert "Net in <" in repr(persisted)
    with torch.no_grad():
        embed.zero_()
    assert not module.out.weight.any()


def test_a_rollback_takes_the_optimizer_back_as_well(store: pmstore.Store) -> None:
    module, optimizer = build("AdamW")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    del optimizer.param_groups[0]["initial_lr"]  # which the training without it lacks
    persist(module, optimizer, store, also={"scheduler": scheduler})
    begun = contents(module, optimizer)
    with pytest.raises(ZeroDivisionError), store.transaction():
        step(module, optimizer, 0)  # creates the state
        scheduler.step()
        raise ZeroDivisionError
    assert contents(module, optimizer) == begun and not optimizer.state and scheduler.last_epoch == 0
    step(module, optimizer, 0)
    store.commit()
    one = contents(module, optimizer)
    for _ in range(2):
        step(module, optimizer, 1)
        scheduler.step()
        optimizer.add_param_group({"params": []})
        module.mean = torch.ones(4)
        store.rollback()
        assert contents(module, optimizer) == one
    assert optimizer.param_groups[0]["lr"] == 0.01
    step(module, optimizer, 1)
    store.commit()
    assert contents(module, optimizer) == trained("AdamW", 2)


def test_an_abandoned_transaction_is_rolled_back_in_the_optimizer_as_well(store: pmstore.Store) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)
    begun = contents(module, optimizer)

    def suspended() -> Any:
        with store.transaction():
            step(module, optimizer, 0)
            yield

    generator = suspended()
    next(generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmstore.AbandonedTransactionWarning)
        generator.throw(KeyError) if False else generator.close()
        assert "new" not in store
    assert contents(module, optimizer) == begun
    step(module, optimizer, 0)
    assert contents(module, optimizer) == trained("Adam", 1)


def test_a_rollback_of_persist_itself(store: pmstore.Store) -> None:
    module, optimizer = build()
    with pytest.raises(ZeroDivisionError), store.transaction():
        persist(module, optimizer, store)
        raise ZeroDivisionError
    assert not len(store)
    with pytest.raises(pmstore.DetachedError, match="was rolled back.*call persist again"):
        optimizer.step()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    assert contents(module, optimizer) == trained("Adam", 1)


def test_rates_and_schedulers_are_those_of_the_last_commit(open_store: Open) -> None:
    def run(store: pmstore.Store, numbers: range) -> Any:
        module, optimizer = build()
        schedulers = {
            "milestones": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
            "scaler": torch.amp.GradScaler("cpu"),
        }
        persist(module, optimizer, store, also=schedulers)
        for number in numbers:
            step(module, optimizer, number)
            schedulers["milestones"].step()
            schedulers["plateau"].step(number)
            store.commit()
        told = [{**one.state_dict()} for one in schedulers.values()]
        store.close()
        return contents(module, optimizer), told

    whole = run(open_store(), range(7))
    assert run(open_store("other.pm"), range(3)) != whole
    assert run(open_store("other.pm"), range(3, 7)) == whole
    module, optimizer = build()
    with (
        open_store("other.pm") as store,
        pytest.raises(pmstore.FingerprintMismatchError, match="state of 'milestones'"),
    ):
        persist(module, optimizer, store)


def test_a_rate_that_is_set_by_hand_after_the_step(open_store: Open) -> None:
    store = open_store()
    module, optimizer = build()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.5
    store.close()
    module, optimizer = build()
    with open_store() as store:
        persist(module, optimizer, store)
        assert optimizer.param_groups[0]["lr"] == 0.5


# ---- what does not fit


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


def test_what_persist_can_not_keep(store: pmstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = build()
    for wrong, text in (
        (lambda: persist(3, None, store), "module is a torch.nn.Module"),
        (lambda: persist(module, store, optimizer), "store is a Store or a Group"),
        (lambda: persist(module, 3, store), "optimizer is a torch.optim.Optimizer"),
        (lambda: persist(module, torch.optim.LBFGS(module.parameters()), store), "LBFGS"),
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
    with pytest.raises(pmstore.NameConflictError, match="'config' already; another training needs a group"):
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
    "a parameter": (lambda m: setattr(m.frozen, "bias", nn.Parameter(torch.ones(4))), "'frozen.bias' .* replaced by"),
    "share_memory": (lambda m: m.share_memory(), "'embed.weight' .* other memory"),
    "deleted": (lambda m: setattr(m.frozen, "bias", None), "'frozen.bias' .* was deleted"),
    "another layer": (lambda m: setattr(m, "norm", nn.BatchNorm1d(4)), "other modules inside"),
    "a new layer": (lambda m: setattr(m, "new", nn.Linear(1, 1)), "other modules inside"),
    "a new parameter": (lambda m: m.frozen.register_parameter("x", nn.Parameter(torch.ones(1))), "other tensors"),
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


def test_what_leaves_a_module_where_it_is(store: pmstore.Store) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)
    module.float().to("cpu").eval().train().requires_grad_()
    optimizer.zero_grad(set_to_none=False)
    module.state_dict()["frozen.weight"].zero_()
    store["module/frozen.bias"] = torch.ones(4)
    step(module, optimizer, 0)
    store.commit()
    assert not store["module/norm.running_mean"].all() or module.frozen.bias.sum() != 4
    optimizer.add_param_group({"params": [], "lr": 3.0})
    store.commit()
    assert store["training/optimizer/parameters"][1] == []


def test_load_state_dict_lands_in_the_store(open_store: Open) -> None:
    store = open_store()
    module, optimizer = build()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    store.commit()
    other, others = build(seed=5)
    for number in range(3):
        step(other, others, number)
    module.load_state_dict(other.state_dict())
    optimizer.load_state_dict(copy.deepcopy(others.state_dict()))
    store.commit()
    address = store["optimizer/embed.weight/exp_avg"].ctypes.data
    assert optimizer.state[module.embed.weight]["exp_avg"].data_ptr() == address
    assert contents(module, optimizer) == contents(other, others)
    store.close()
    module, optimizer = build()
    persist(module, optimizer, open_store())
    assert contents(module, optimizer) == contents(other, others)


def test_a_state_that_is_taken_away_is_deleted(store: pmstore.Store) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    store.commit()
    del optimizer.state[module.embed.weight]["exp_avg"]
    optimizer.state[module.norm.bias].clear()
    store.commit()
    assert sorted(store.group("optimizer/embed.weight")) == ["exp_avg_sq", "step"]
    assert not len(store.group("optimizer/norm.bias")) and len(store.group("optimizer/norm.weight")) == 3
    optimizer.state.clear()
    store.commit()
    assert not len(store.group("optimizer"))


def test_a_group_that_is_added_in_the_middle(open_store: Open) -> None:
    store = open_store()
    module = Net()
    optimizer = torch.optim.SGD(module.norm.parameters(), 0.1, momentum=0.9)
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    module.frozen.requires_grad_()
    optimizer.add_param_group({"params": module.frozen.parameters(), "lr": 0.01})
    step(module, optimizer, 1)
    store.commit()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="group 2 has a parameter"):
        store.commit()
    store.rollback()
    store.close()
    other = Net()
    optimizer = torch.optim.SGD(other.norm.parameters(), 0.1, momentum=0.9)
    with open_store() as store:
        with pytest.raises(pmstore.FingerprintMismatchError, match="2 groups"):
            persist(other, optimizer, store)
        optimizer.add_param_group({"params": other.frozen.parameters()})
        persist(other, optimizer, store)
        assert optimizer.param_groups[1]["lr"] == 0.01 and contents(other, None) == contents(module, None)


def test_an_optimizer_that_has_learned_before(store: pmstore.Store) -> None:
    module, optimizer = build()
    step(module, optimizer, 0)
    persist(module, optimizer, store)
    assert store["optimizer/embed.weight/step"] == 1
    step(module, optimizer, 1)
    assert contents(module, optimizer) == trained("Adam", 2) and store["optimizer/embed.weight/step"] == 2


# ---- copies, and persist again


def test_copies_of_a_module_are_ordinary(store: pmstore.Store) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)
    step(module, optimizer, 0)
    out = io.BytesIO()
    torch.save(module, out)
    out.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(out, weights_only=False)]
    for other in copies:
        others = torch.optim.Adam(other.parameters(), 0.01)
        others.load_state_dict(copy.deepcopy(optimizer).state_dict())
        assert contents(other, others) == contents(module, optimizer)
        assert other.out.weight is other.embed.weight
        step(other, others, 1)
        assert contents(other, others) == trained("Adam", 2)
    assert contents(module, optimizer) == trained("Adam", 1)
    store.commit()


def test_persist_again(open_store: Open) -> None:
    store = open_store()
    module, optimizer = build()
    first = persist(module, optimizer, store)
    step(module, optimizer, 0)
    again = persist(module, optimizer, store)  # a cell that is run again
    assert again.resumed and not first.resumed
    step(module, optimizer, 1)
    store.commit()
    assert contents(module, optimizer) == trained("Adam", 2)
    with pytest.raises(ValueError, match=r"lies in .* already: persist copy.deepcopy\(module\)"):
        persist(module, None, store.group("other"))
    with open_store("other.pm") as other, pytest.raises(ValueError, match="already"):
        persist(module, optimizer, other)
    later = torch.optim.Adam(module.parameters(), 0.5)
    persist(module, later, store)
    assert later.param_groups[0]["lr"] == 0.01
    with pytest.raises(pmstore.DetachedError, match="another module or optimizer in its place"):
        optimizer.step()
    step(module, later, 2)
    store.commit()
    assert contents(module, later) == trained("Adam", 3)
    newer, newest = build(seed=1)
    persist(newer, newest, store)
    with pytest.raises(pmstore.DetachedError):
        later.step()
    step(newer, newest, 3)
    store.commit()
    assert contents(newer, newest) == trained("Adam", 4)


def test_two_modules_in_groups_of_one_store(store: pmstore.Store) -> None:
    pairs = [build(seed=seed) for seed in range(2)]
    for name, pair in zip("ab", pairs):
        persist(*pair, store.group(name))
    for pair in pairs:
        step(*pair, 0)
    store.commit()
    assert contents(*pairs[0]) == trained("Adam", 1) != contents(*pairs[1])


def test_nothing_keeps_a_module_alive(store: pmstore.Store) -> None:
    module, optimizer = build()
    gone = [weakref.ref(persist(module, optimizer, store)), weakref.ref(module), weakref.ref(optimizer)]
    step(module, optimizer, 0)
    store.commit()
    del module, optimizer
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    store.commit()


def test_a_module_without_tensors(store: pmstore.Store) -> None:
    module = nn.ReLU()
    persist(module, None, store)
    store.commit()
    assert persist(module, None, store).resumed


def test_a_forked_child_does_not_train_in_the_store(store: pmstore.Store) -> None:
    module, optimizer = build()
    persist(module, optimizer, store)

    def train() -> None:
        torch.set_num_threads(1)
        with pytest.raises(pmstore.ForkedStoreError):
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run_in_fork(train)
    step(module, optimizer, 0)
    store.commit()


def test_bfloat16_and_float8_are_kept(open_store: Open, medium: Medium) -> None:
    store = open_store()
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).bfloat16()
    module.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))
    optimizer = torch.optim.AdamW(module.parameters())
    persist(module, optimizer, store)
    module(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    store.close()
    other = copy.deepcopy(module)
    others = torch.optim.AdamW(other.parameters())
    with torch.no_grad():
        other[0].weight.zero_()
    with open_store() as store:
        persist(other, others, store)
        assert torch.equal(other[0].weight, module[0].weight) and other.scale.dtype is torch.float8_e4m3fn
        assert others.state[other[0].weight]["exp_avg"].dtype is torch.bfloat16
