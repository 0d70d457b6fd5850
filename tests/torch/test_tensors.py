"""Tensors in stores, and tensors over the memory of a store."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pmstore
import pmstore.torch
from tests.conftest import Medium

Open = Callable[..., pmstore.Store]

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes by chance, as elements of the dtype."""
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    chance = np.random.default_rng(0).integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)
    return torch.from_numpy(chance).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_every_dtype_comes_back_also_after_an_opening(open_store: Open, dtype: torch.dtype) -> None:
    store = open_store()
    tensors = {str(shape): values(shape, dtype) for shape in [(), (3,), (2, 3), (0, 4), (700, 2, 2)]}
    store.group("all").update(tensors)
    found = pmstore.torch.state_dict(store.group("all"))
    for name, one in found.items():
        assert type(one) is torch.Tensor and (not one.numel() or one.data_ptr() == store[f"all/{name}"].ctypes.data)
    store.close()
    with open_store() as store:
        again = pmstore.torch.state_dict(store.group("all"))
        for name, tensor in tensors.items():
            for one in (found[name], again[name]):
                assert one.dtype is dtype and one.shape == tensor.shape and bits(one) == bits(tensor)
        assert store.check().ok


def test_a_dtype_that_numpy_lacks_describes_itself(store: pmstore.Store) -> None:
    store["w"] = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert store["w"].dtype == [("bfloat16", "<u2")] and store["w"]["bfloat16"].tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(12.0).reshape(3, 4).t(), id="transposed"),
        pytest.param(torch.arange(12.0).reshape(3, 4)[:, ::2], id="every second"),
        pytest.param(torch.arange(3.0).expand(4, 3), id="expanded"),
        pytest.param(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(torch.arange(4.0).requires_grad_(), id="with a gradient"),
        pytest.param(torch.arange(4.0).requires_grad_() * 2, id="computed with a gradient"),
        pytest.param(torch.nn.Parameter(torch.arange(4.0)), id="parameter"),
        pytest.param(torch.tensor([1 + 2j]).conj(), id="conjugated"),
        pytest.param(torch.tensor([1 + 2j]).conj().imag, id="negated"),
        pytest.param(torch.arange(12.0).reshape(3, 4).t().to(torch.bfloat16)[1:], id="a part, bfloat16"),
    ],
)
def test_elements_are_stored_whatever_the_tensor_is(store: pmstore.Store, tensor: torch.Tensor) -> None:
    store["w"] = tensor
    found = pmstore.torch.tensor(store, "w")
    assert torch.equal(found, tensor.detach()) and found.dtype is tensor.dtype and not found.requires_grad
    store.create_array("filled", (2, *tensor.shape), store["w"].dtype, fill_value=tensor)
    assert torch.equal(pmstore.torch.tensor(store, "filled"), found.expand(2, *tensor.shape))


def test_a_tensor_goes_into_the_array_that_is_there(store: pmstore.Store) -> None:
    store["w"] = torch.zeros(3, dtype=torch.bfloat16)
    live = pmstore.torch.tensor(store, "w")
    store["w"] = torch.ones(3, dtype=torch.bfloat16)
    assert live.tolist() == [1, 1, 1]
    store["w"] = live + 1
    assert live.tolist() == [2, 2, 2]
    store["w"] = live
    store["w"] = torch.ones(3)  # another dtype: another array
    assert live.tolist() == [2, 2, 2] and pmstore.torch.tensor(store, "w").dtype is torch.float32


def test_in_place_operations_are_changes_of_the_store(open_store: Open) -> None:
    store = open_store()
    store["w"] = torch.zeros(1000, 4)
    w = pmstore.torch.tensor(store, "w")
    address = w.data_ptr()
    store.commit()
    with store.transaction():
        w[3:5] += 2
        w.t()[1].fill_(7)
    with pytest.raises(ZeroDivisionError), store.transaction():
        w.normal_()
        raise ZeroDivisionError
    assert w.sum() == 7 * 1000 + 2 * 3 * 2
    store["large"] = torch.zeros(1 << 20)  # the file grows
    assert w.data_ptr() == address
    w[0] = -1
    store.close()
    with open_store() as store:
        assert torch.equal(pmstore.torch.tensor(store, "w"), w) and store["w"][0].tolist() == [-1] * 4


def test_after_close_the_commit_raises(open_store: Open) -> None:
    store = open_store()
    store["w"] = torch.zeros(3)
    w = pmstore.torch.tensor(store, "w")
    store.close()
    w += 1  # into memory that nobody keeps: docs/training.md
    with pytest.raises(pmstore.ClosedStoreError):
        store.commit()
    with open_store() as store:
        assert pmstore.torch.tensor(store, "w").tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
        (lambda: torch.empty(3, device="meta"), "device meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "int_repr"),
        (lambda: torch.zeros(3, dtype=torch.bits8), "torch.bits8"),
        (lambda: [torch.ones(3)], r"store.group\(name\).update"),
        (lambda: {"a": {"b": torch.ones(3)}}, r"store.group\(name\).update"),
        (lambda: (1, torch.ones(3)), r"store.group\(name\).update"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_plain_elements_is_refused(store: pmstore.Store, make: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        store["w"] = make()
    assert "w" not in store


def test_a_state_dict_leads_to_what_works(open_store: Open) -> None:
    store = open_store()
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
    with pytest.raises(TypeError, match=r"store.group\(name\).update\(.* pmstore.torch.state_dict"):
        store["best"] = module.state_dict()
    with pytest.raises(TypeError, match=r"store.group\(name\).update\("):
        store["best"] = dict(module.state_dict())
    store.group("best").update(module.state_dict())
    store.close()
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
    with open_store(mode="r") as store:
        found = pmstore.torch.state_dict(store.group("best"))
        assert list(found) == sorted(module.state_dict()) and pmstore.torch.state_dict(store.group("none")) == {}
        other.load_state_dict(found)
    for name, tensor in module.state_dict().items():
        assert bits(other.state_dict()[name]) == bits(tensor)
        other.state_dict()[name].zero_()  # it is the module's own


def test_what_torch_has_no_tensors_for(store: pmstore.Store) -> None:
    for value in (np.ones(3, ">f4"), np.array(["a"]), np.ones(2, [("a", "f4"), ("b", "u2")]), np.ones(2, "M8[s]")):
        store["x"] = value
        with pytest.raises(TypeError, match="torch has no tensors like"):
            pmstore.torch.tensor(store, "x")
    store["x"] = np.ones(2, [("bfloat16", "<f4")])  # not what stands for bfloat16
    with pytest.raises(TypeError, match="torch has no tensors like"):
        pmstore.torch.tensor(store, "x")
    store["x"] = 3
    with pytest.raises(TypeError, match="not an array but a int"):
        pmstore.torch.tensor(store, "x")
    with pytest.raises(KeyError, match="near it: 'x'"):
        pmstore.torch.tensor(store, "xx")


def test_a_fortran_array_keeps_its_order(store: pmstore.Store) -> None:
    store["x"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found = pmstore.torch.tensor(store, "x")
    assert found.stride() == (1, 2) and found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_those_without_torch_do_not_import_it(tmp_path: Path) -> None:
    code = "import sys, pmstore.archive, numpy as np; store = pmstore.open(sys.argv[1]); store['w'] = np.ones(3)\n"
    code += "try:\n    store['x'] = object()\nexcept TypeError:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "store.pm"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_without_torch_the_extra_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport pmstore\npmstore.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pmstore.torch needs torch: pip install 'pmstore[torch]'" in done.stderr


# ---- tensors that can't be written


@pytest.fixture(params=["snapshot", "constant", "constant in a snapshot"])
def read_only(open_store: Open, request: pytest.FixtureRequest) -> torch.Tensor:
    """A tensor of elements 0 … 11, shape (3, 4)."""
    store = open_store()
    contents = np.arange(12, dtype=np.float32).reshape(3, 4)
    store.create_array("x", (3, 4), "f4", fill_value=contents, writeable=request.param == "snapshot")
    store.commit()
    found = pmstore.torch.tensor(store if request.param == "constant" else open_store(mode="r"), "x")
    request.node.kept = store
    return found


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "+=": lambda x: x.__iadd__(1),
    "an item": lambda x: x.__setitem__((0, 0), 1),
    "a mask": lambda x: x.__setitem__(x > 3, 1),
    "a row": lambda x: x[0].zero_(),
    "a transposed part": lambda x: x.t()[1:].fill_(2),
    "reshaped": lambda x: x.reshape(-1).zero_(),
    "each": lambda x: next(iter(x)).zero_(),
    "split": lambda x: torch.split(x, 1)[0].zero_(),
    "unsafe split": lambda x: torch.unsafe_split(x, 1)[0].zero_(),
    "unbound": lambda x: x.unbind()[0].zero_(),
    "detached": lambda x: x.detach().zero_(),
    "data": lambda x: x.data.zero_(),
    "as another dtype": lambda x: x.view(torch.int32).zero_(),
    "the same dtype": lambda x: x.float().zero_(),
    "to": lambda x: x.to("cpu").contiguous().zero_(),
    "as_tensor": lambda x: torch.as_tensor(x).zero_(),
    "out": lambda x: torch.add(torch.ones(3, 4), 1, out=x),
    "foreach": lambda x: torch._foreach_add_([torch.ones(1), x], 1),
    "relu": lambda x: torch.nn.functional.relu(x, inplace=True),
    "init": lambda x: torch.nn.init.normal_(x),
    "copy_": lambda x: x.copy_(torch.ones(3, 4)),
    "resize_": lambda x: x.resize_(2),
    "set_": lambda x: x.set_(torch.ones(2)),
    "a parameter": lambda x: torch.optim.SGD([_with_gradient(torch.nn.Parameter(x))]).step(),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor).zero_(),
    "under no_grad": lambda x: _under(torch.no_grad(), lambda: x.mul_(2)),
    "in inference mode": lambda x: _under(torch.inference_mode(), lambda: x.mul_(2)),
}


def _with_gradient(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    parameter.grad = torch.ones(3, 4)
    return parameter


def _under(context: Any, call: Callable[[], object]) -> None:
    with context:
        call()


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writing_to_what_can_not_be_written_is_an_error(read_only: torch.Tensor, write: Any) -> None:
    with pytest.raises(pmstore.ReadOnlyStoreError, match=r"tensor.clone\(\) can be written"):
        write(read_only)
    assert read_only.tolist() == np.arange(12).reshape(3, 4).tolist()


def test_all_else_is_as_of_any_tensor(read_only: torch.Tensor) -> None:
    plain = torch.arange(12.0).reshape(3, 4)
    layer = torch.nn.Linear(4, 2)
    for compute in (
        lambda x: x + 1,
        lambda x: 1 / (x + 1),
        lambda x: x @ x.t(),
        lambda x: torch.stack([x[0], x[1]]),
        lambda x: torch.cat([x, plain]),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: torch.utils.data.default_collate([x[0], x[2]]),
        lambda x: x.clone(),
        lambda x: x.double(),
        lambda x: x.to(torch.bfloat16),
        layer,
        lambda x: torch.ones(3, 4).copy_(x),
        lambda x: x.sum(),
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: pickle.loads(pickle.dumps(x[1:, ::2])),
        lambda x: torch.load(_saved(x)),
    ):
        found: torch.Tensor = compute(read_only)
        assert type(found) is torch.Tensor and torch.equal(found, compute(plain))
        found.detach().zero_()
    x = read_only
    assert type(x) is pmstore.torch.ReadOnlyTensor and repr(x) == repr(plain).replace("tensor", "ReadOnlyTensor")
    assert x.tolist() == plain.tolist() and x[1, 2].item() == 6 and len(x) == 3 and float(x[0, 1]) == 1
    assert f"{x[0, 1]:.1f}" == "1.0" and [len(row) for row in x] == [4, 4, 4]
    layer(x).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad[0].tolist() == plain.sum(0).tolist()
    for array in (x.numpy(), np.asarray(x), x[1:].numpy()):
        assert not array.flags.writeable and array.ctypes.data in (x.data_ptr(), x[1:].data_ptr())
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    assert np.array(x, dtype="f8").flags.writeable
    with pytest.raises(BufferError, match="clone"):
        torch.from_dlpack(x)
    with pytest.raises(BufferError, match="clone"):
        np.from_dlpack(x)


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(tensor, out)
    out.seek(0)
    return out


def test_a_read_only_bfloat16(open_store: Open) -> None:
    store = open_store()
    store["w"] = torch.ones(3, dtype=torch.bfloat16)
    store["empty"] = torch.ones(0, dtype=torch.bfloat16)
    store.commit()
    look = open_store(mode="r")
    w = pmstore.torch.tensor(look, "w")
    assert w.dtype is torch.bfloat16 and (w + 1).tolist() == [2, 2, 2]
    assert pmstore.torch.tensor(look, "empty").shape == (0,)
    with pytest.raises(pmstore.ReadOnlyStoreError):
        w[0] = 2
    store["again"] = w
    assert pmstore.torch.tensor(store, "again").tolist() == [1, 1, 1]


def test_an_archive_or_a_copy_of_the_store_has_the_dtype(open_store: Open, medium: Medium) -> None:
    store = open_store()
    store["w"] = torch.ones(3, dtype=torch.bfloat16)
    store.copy("w", "v")
    store.commit()
    store.backup(medium.directory / "copy.pm")
    with open_store("copy.pm") as other:
        assert pmstore.torch.tensor(other, "v").dtype is torch.bfloat16


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of a store that it holds."""

    def __init__(self, store: pmstore.Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return pmstore.torch.tensor(self.store, "x")[number], number


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_data_loader_read_tensors(open_store: Open, start: str, batch: int | None) -> None:
    if start == "spawn" and batch is None:
        pytest.skip("as with batches, and each process takes seconds to start")
    store = open_store()
    x = torch.arange(24.0).reshape(6, 4)
    store.create_array("x", (6, 4), "f4", fill_value=x.numpy(), writeable=False)
    store.commit()
    loader = torch.utils.data.DataLoader(
        Rows(store), batch_size=batch, num_workers=1, multiprocessing_context=multiprocessing.get_context(start)
    )
    found = list(loader)
    rows = torch.cat([rows for rows, _ in found]) if batch else torch.stack([row for row, _ in found])
    assert torch.equal(rows, x) and {type(rows) for rows, _ in found} == {torch.Tensor}
    found[0][0].zero_()


def test_statistics_that_can_not_be_written_are_read_and_not_trained(tmp_path: Path) -> None:
    """Their operation does not say that it writes to them while it trains."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
    rows = torch.randn(8, 4)
    with pmstore.open(tmp_path / "s.pm") as store:
        store.group("m").update(net.state_dict())
    wanted = net.eval()(rows)
    with pmstore.open(tmp_path / "s.pm", "r") as store:
        net.load_state_dict(pmstore.torch.state_dict(store.group("m")), assign=True)
        assert torch.equal(net(rows), wanted)
        net[1].num_batches_tracked = torch.tensor(0)
        with pytest.raises(pmstore.ReadOnlyStoreError):
            net.train()(rows)
        assert not store["m/1.running_mean"].any()


def test_functions_of_elements_write_nothing_that_can_not_be_written(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        store["x"] = np.arange(6.0)
    with pmstore.open(tmp_path / "s.pm", "r") as store:
        x = pmstore.torch.tensor(store, "x")
        ones = torch.ones(6)
        for write in (
            lambda: x.apply_(lambda v: v + 1),
            lambda: x.map_(ones, lambda a, b: a + b),
            lambda: x[:3].map2_(ones[:3], ones[:3], lambda a, b, c: a + b + c),
        ):
            with pytest.raises(pmstore.ReadOnlyStoreError, match="clone"):
                write()
        view = torch.ops.aten._unsafe_view(x, [2, 3])
        with pytest.raises(pmstore.ReadOnlyStoreError):
            view.add_(1)
        assert store["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_of_a_dict_are_exported(tmp_path: Path) -> None:
    weights = {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.float16)}
    assert pmstore.export(weights, tmp_path / "w.npz") == 2
    with np.load(tmp_path / "w.npz") as found:
        assert found["w"].tolist() == weights["w"].tolist() and found["half"].dtype == np.float16
