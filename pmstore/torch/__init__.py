"""Tensors and training of torch in stores (docs/training.md). It needs the extra ``torch``.

`tensor` is a tensor over the memory of a store, and `persist` keeps a module and its optimizer in one: what they change
in place is a change of the store, and the next commit takes it. `GradLog` logs the gradients of each iteration instead,
and replays them after a crash; `BatchSampler` and `Seeded` keep the position in the data.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ModuleNotFoundError("pmstore.torch needs torch: pip install 'pmstore[torch]'", name="torch") from error

from pmstore.torch._gradlog import GradLog
from pmstore.torch._persist import Persisted, persist
from pmstore.torch._processes import register as _register
from pmstore.torch._sampler import BatchSampler, Seeded
from pmstore.torch._tensors import ReadOnlyTensor, state_dict, tensor

__all__ = ["tensor", "state_dict", "ReadOnlyTensor", "persist", "Persisted", "GradLog", "BatchSampler", "Seeded"]

_register()
