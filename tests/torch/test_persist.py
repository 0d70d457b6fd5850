"""A module and its optimizer in a store."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmstore
import pmstore.torch
from pmstore.torch import persist
from tests.conftest import Medium, run_in_fork
from tests.torch.nets import OPTIMIZERS, Net, build, contents, step, trained
from tests.torch.training import Holder

Open = Callable[..., pmstore.Store]


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
        generator.close()
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


class Warm(torch.optim.SGD):
    """It counts its steps in a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.state.setdefault("all", {"steps": 0})  # type: ignore[call-overload]
        count["steps"] += 1
        self.param_groups[0]["lr"] = 0.01 * count["steps"]
        super().step(closure)


def test_a_state_that_belongs_to_no_parameter(open_store: Open) -> None:
    store = open_store()
    module, _ = build()
    optimizer = Warm(module.parameters())
    persist(module, optimizer, store)
    with pytest.raises(ZeroDivisionError), store.transaction():
        step(module, optimizer, 0)
        raise ZeroDivisionError
    assert not optimizer.state
    for number in range(2):
        step(module, optimizer, number)
        store.commit()
    store.close()
    module, _ = build(seed=1)
    optimizer = Warm(module.parameters())
    store = open_store()
    persist(module, optimizer, store)
    step(module, optimizer, 2)
    store.commit()
    plain, _ = build()
    its_optimizer = Warm(plain.parameters())
    for number in range(3):
        step(plain, its_optimizer, number)
    assert contents(module, optimizer) == contents(plain, its_optimizer)
    optimizer.state["rates"] = torch.ones(2)  # type: ignore[index]
    store.commit()
    optimizer.state["rates"] += 1  # type: ignore[index]
    store.rollback()
    assert torch.equal(optimizer.state["rates"], torch.ones(2))  # type: ignore[index]
    optimizer.state["all"]["rates"] = torch.ones(2)  # type: ignore[index]
    with pytest.raises(TypeError, match="can't keep the optimizer's state: .*torch.Tensor inside another value"):
        store.commit()


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


@pytest.mark.parametrize("change", ["added", "removed", "the first removed", "appended", "none"])
@pytest.mark.parametrize("steps", [0, 2])
def test_groups_of_a_transaction_that_is_rolled_back(store: pmstore.Store, change: str, steps: int) -> None:
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    first, second = ([*part.parameters()] for part in module)
    optimizer = torch.optim.Adam([{"params": first}, {"params": second[:1], "lr": 0.1}], 0.01)
    persist(module, optimizer, store)

    def train(size: float) -> None:
        optimizer.zero_grad()
        module[1](module[0](size * torch.ones(2, 3))).square().sum().backward()
        optimizer.step()

    for _ in range(steps):
        with store.transaction():
            train(1.0)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"]), contents(module, optimizer)
    lists = [group["params"] for group in optimizer.param_groups]
    with pytest.raises(KeyError), store.transaction():
        if change == "added":
            optimizer.add_param_group({"params": second[1:]})
        elif change == "appended":
            optimizer.param_groups[1]["params"].append(second[1])
        elif change != "none":
            del optimizer.param_groups[-1 if change == "removed" else 0]
        train(5.0)
        raise KeyError
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, first)),
        [id(second[0])],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]
    assert change in ("removed", "the first removed") or all(
        one is group["params"] for one, group in zip(lists, optimizer.param_groups, strict=True)
    )
    assert len(optimizer.state) == (3 if steps else 0)
    assert (optimizer.state_dict()["param_groups"], contents(module, optimizer)) == before
    with store.transaction():
        train(1.0)
    assert not torch.equal(second[0], second[0].new_zeros(3, 3))


def test_an_optimizer_for_a_module_that_was_stored_without_one(open_store: Open) -> None:
    module, _ = build()
    with open_store() as store:
        persist(module, None, store)
    module, optimizer = build(seed=1)
    with open_store() as store:
        assert persist(module, optimizer, store).resumed
        step(module, optimizer, 0)
    module, optimizer = build(seed=2)
    with open_store() as store:
        persist(module, optimizer, store)
        assert contents(module, optimizer) == trained("Adam", 1)


def test_a_hyperparameter_that_changes_in_place(open_store: Open) -> None:
    store = open_store()
    module, optimizer = build("a tensor as rate")
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    persist(module, optimizer, store)
    optimizer.param_groups[0]["betas"][0] = 0.5
    optimizer.param_groups[0]["lr"].fill_(0.25)
    store.close()
    module, optimizer = build("a tensor as rate")
    with open_store() as store:
        persist(module, optimizer, store)
        assert optimizer.param_groups[0]["betas"] == [0.5, 0.99] and optimizer.param_groups[0]["lr"].item() == 0.25
        store["training/optimizer/hyperparameters"] = [{"lr": 3}]
        store.rollback()
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


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


def test_the_next_commit_lets_a_module_go(store: pmstore.Store) -> None:
    module, optimizer = build()
    gone = [weakref.ref(persist(module, optimizer, store)), weakref.ref(module), weakref.ref(optimizer)]
    step(module, optimizer, 0)
    store.commit()
    del module, optimizer
    store.commit()
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    store.commit()


class Rotary(nn.Linear):
    """Its first call registers a buffer that is not kept, as a cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(4), persistent=False)
        return super().forward(x * self.cache)


def test_a_buffer_that_is_not_kept_may_come_later(store: pmstore.Store) -> None:
    module = Rotary(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    persist(module, optimizer, store)
    for _ in range(2):
        module(torch.ones(4)).sum().backward()
        optimizer.step()
        store.commit()
    assert sorted(store.group("module")) == ["bias", "weight"]
    module.register_buffer("cache", torch.ones(4))
    with pytest.raises(pmstore.DetachedError, match="other tensors than at persist"):
        store.commit()


def test_kept_objects_get_dicts_of_their_types(open_store: Open) -> None:
    given = {"lists": defaultdict(list, {"x": [1]}), "counts": [Counter("aab")], "ordered": OrderedDict(b=1, a=2)}
    module = nn.Linear(2, 2)
    for _ in range(2):
        holder, store = Holder(copy.deepcopy(given)), open_store()
        persist(module, None, store, also={"holder": holder})
        store.rollback()
        assert holder.state == given
        assert list(map(type, holder.state.values())) == [defaultdict, list, OrderedDict]
        assert type(holder.state["counts"][0]) is Counter
        store.close()
    assert holder.state["lists"]["new"] == []


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


def test_a_buffer_that_becomes_its_own_transpose_is_stored(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.register_buffer("square", torch.arange(9.0).reshape(3, 3))
    with pmstore.open(tmp_path / "x.pm") as store:
        persist(module, None, store)
        module.square = module.square.t()
        store.commit()
        assert store["module/square"].tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
        module.square.data = module.square.data.t()
        store.commit()
        assert store["module/square"].tolist() == module.square.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_scheduler_of_a_rate_that_is_a_tensor(tmp_path: Path) -> None:
    """Its state has tensors in lists. An average of the weights has them in a dict."""

    def train(path: Path, until: int) -> Any:
        module, _ = build()
        optimizer = torch.optim.Adam(module.parameters(), torch.tensor(0.01), foreach=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        average = torch.optim.swa_utils.AveragedModel(module)
        with pmstore.open(path) as store:
            persist(module, optimizer, store, also={"scheduler": scheduler, "average": average})
            for number in range(store.get("done", 0), until):
                with store.transaction():
                    step(module, optimizer, number)
                    scheduler.step()
                    average.update_parameters(module)
                    store["done"] = number + 1
            assert isinstance(scheduler.state_dict()["base_lrs"][0], torch.Tensor)
            return contents(module, optimizer), contents(average, None), repr(scheduler.state_dict())

    train(tmp_path / "cut.pm", 3)
    assert train(tmp_path / "cut.pm", 7) == train(tmp_path / "whole.pm", 7)


def test_buffers_that_become_each_other_are_stored(tmp_path: Path) -> None:
    module = torch.nn.Module()
    for number, name in enumerate("abc"):
        module.register_buffer(name, torch.full((2,), float(number)))
    with pmstore.open(tmp_path / "x.pm") as store:
        persist(module, None, store)
        for number in range(3, 6):
            module.c, module.b, module.a = module.b, module.a, torch.full((2,), float(number))
            store.commit()
        module.a, module.b = module.b, module.a
        store.commit()
    with pmstore.open(tmp_path / "x.pm", "r") as store:
        assert [store[f"module/{name}"].tolist() for name in "abc"] == [[4, 4], [5, 5], [3, 3]]


def test_strides_that_mean_nothing_are_not_compared(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(3, 1))
    with pmstore.open(tmp_path / "x.pm") as store:
        persist(module, None, store)
        for part, strides in zip(module, ((1, 4), (1, 1))):
            part.weight.data = part.weight.data.as_strided(part.weight.shape, strides)
            with torch.no_grad(), store.transaction():
                part.weight.fill_(7)
        assert (store["module/0.weight"] == 7).all() and (store["module/1.weight"] == 7).all()
