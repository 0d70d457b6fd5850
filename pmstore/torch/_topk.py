"""Top-k compression of gradients with error feedback: elements that are left out are added to the next gradient.

The optimizer gets the kept elements only, so that the log, which holds no others, leads to the same parameters. This
changes training, as it does where gradients are compressed for communication.

On a GPU, starting an operation costs more than most of its work, so that operations are for many parameters at once::

    gradients ──add──▶ residuals ──sort, top-k──▶ values, indices ──gather──▶ bytes ──copy──▶ row
        ▲                                               │
        └────────────────────copy, scatter──────────────┘
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from pmstore.torch._layout import Layout, Rows, index_dtype

__all__ = ["Compression"]

logger = logging.getLogger("pmstore")

_SAMPLED = 64  # one of so many elements is looked at to guess the threshold
_SAFE = 1.3  # more candidates than are kept, so that the guess is seldom too high
_SMALL = 8192  # elements; below, all are candidates
_SORTED = 1 << 17  # elements; a GPU handles all parameters with no more of them together, as each launch costs
_SINGLE = 16  # times that the operations are done one by one first: to make a graph of them takes some 0.1 s
_KNOWN = 4  # combinations of parameters for which a device keeps what it has prepared
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Compression:
    """The residuals: the sums of the elements that were left out of the gradients of some parameters so far.

    Parameters
    ----------
    layout : Layout
        That of the rows, which says how many elements are kept.

    Attributes
    ----------
    residuals : list of torch.Tensor
        For each parameter what was not given to the optimizer yet.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._devices = [Device(layout, one) for one in dict.fromkeys(one.device for one in layout.parameters)]
        parts = {number: part for one in self._devices for pool in one.pools for number, part in pool.parts.items()}
        self.residuals = [in_shape(parts[number], layout, number) for number in range(len(layout.parameters))]

    @staticmethod
    def resolved(number: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that `compress` can write to: autograd may leave conjugated and negated views."""
        return gradient.resolve_conj().resolve_neg()

    def compress(self, rows: Rows, row: int) -> None:
        """Write the kept elements of the parameters' gradients into a row, and leave only them in the gradients."""
        found = dict(self._layout.gradients())
        for device in self._devices:
            device.compress(found, rows, row)

    def replay(self, number: int, gradient: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Turn a gradient into the result of `compress`. The residuals of these elements are 0."""
        put(gradient.zero_(), self._layout.strides[number], chosen, kept)
        in_memory_order(self.residuals[number])[chosen] = 0


class Device:
    """The parameters on one device.

    Attributes
    ----------
    pools : list of Pool
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        alike: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for number, one in enumerate(layout.parameters):
            if one.device == device:
                alike.setdefault((one.dtype, index_dtype(one.numel())), []).append(number)
        self.pools = [Pool(layout, *kinds, numbers) for kinds, numbers in alike.items()]
        self._known: dict[tuple[int, ...], Step] = {}

    def compress(self, gradients: Mapping[int, torch.Tensor], rows: Rows, row: int) -> None:
        """`Compression.compress`, for the gradients of the parameters on this device."""
        present = tuple(number for number, one in gradients.items() if one.device == self._device)
        step = self._known.pop(present, None) or Step(self._layout, self._device, self.pools, present)
        self._known[present] = step  # the last one of the dict
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        step.compress(gradients, rows, row)


class Pool:
    """The residuals of parameters on one device and of one dtype, in one tensor, each in the order of its memory.

    Attributes
    ----------
    dtype, index_dtype : torch.dtype
        Those of the values and of the indices in a row.
    flat : torch.Tensor
        All residuals; first those of small parameters, which a GPU handles together.
    parts : dict of int to torch.Tensor
        The residual of each parameter, flat.
    keys : torch.Tensor
        int64, for each element of small parameters: the larger, the later its parameter.
    sparse : torch.Tensor
        What is left in the gradients of small parameters.
    sparse_parts : dict of int to torch.Tensor
        The same of each parameter, flat.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, index_dtype: torch.dtype, numbers: Sequence[int]) -> None:
        self.dtype, self.index_dtype = dtype, index_dtype
        device = layout.parameters[numbers[0]].device
        sizes = {number: layout.parameters[number].numel() for number in numbers}
        small = [number for number in numbers if in_one_launch(device) and sizes[number] <= _SORTED]
        sizes = {number: sizes[number] for number in sorted(numbers, key=lambda one: one not in small)}
        lengths = [sizes[number] for number in small]
        self.flat = torch.zeros(sum(sizes.values()), dtype=dtype, device=device)
        self.parts = dict(zip(sizes, self.flat.split(list(sizes.values()))))
        self.keys = torch.from_numpy(np.repeat(np.arange(1, len(small) + 1) << 32, lengths)).to(device)
        self.sparse = self.flat.new_zeros(sum(lengths))
        self.sparse_parts = dict(zip(small, self.sparse.split(lengths)))


class Step:
    """The compression in each iteration in which the same parameters on one device have gradients.

    Its operations work on the same memory each time. A GPU soon does them as one, a CUDA graph. The graph has memory of
    its own for what they compute.
    """

    def __init__(self, layout: Layout, device: torch.device, pools: Sequence[Pool], present: Sequence[int]) -> None:
        self._selections = [Selection(layout, pool, present) for pool in pools]
        self._word = _WORDS[min(4, *(pool.dtype.itemsize for pool in pools))]
        self._zero = torch.zeros(1, dtype=self._word, device=device)
        self._spans = list(self._find_spans(layout, device))
        self._device, self._count = device, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: list[torch.Tensor] = []  # of the graph, the same tensors each time

    def _find_spans(self, layout: Layout, device: torch.device) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The parts of a row that belong to the device: the first byte, the end, and for each word its index in what
        the selections take, behind which there is a zero."""
        size = self._word.itemsize
        words, count = np.full(layout.row_bytes // size, -1), 0
        for place, length in (one for selection in self._selections for one in selection.places()):
            words[place // size : (place + length) // size] = np.arange(count, count + length // size)
            count += length // size
        words[words < 0] = count
        ends = [*(part.values for part in layout.parts[1:]), layout.row_bytes]
        for first, last in runs([number for number, one in enumerate(layout.parameters) if one.device == device]):
            begin, end = layout.parts[first].values, ends[last]
            yield begin, end, torch.from_numpy(words[begin // size : end // size]).to(device)

    def compress(self, gradients: Mapping[int, torch.Tensor], rows: Rows, row: int) -> None:
        """`Compression.compress`, for the gradients of these parameters."""
        for one in self._selections:
            one.add(gradients)
        spans = self._take()
        for one in self._selections:
            one.leave(gradients)
        for (first, end, _), content in zip(self._spans, spans):
            rows.content[row, first:end].copy_(content, non_blocking=True)  # until `Layout.arrived`

    def _take(self) -> list[torch.Tensor]:
        """Take the largest elements of the residuals. Returns what a row gets: the bytes of each span."""
        self._count += 1
        if self._count == _SINGLE and self._device.type == "cuda":
            try:
                self._capture()
            except RuntimeError as error:
                logger.info("GradLog: no CUDA graph, each operation is started: %s", error)
        if self._graph is None:
            return self._take_singly()
        self._graph.replay()
        return self._results

    def _capture(self) -> None:
        """Make a graph of the operations, none of which is executed."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        outside = torch.cuda.stream(torch.cuda.current_stream(self._device))  # also after an error
        with collection_disabled(), outside, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._results = self._take_singly()
        self._graph = graph

    def _take_singly(self) -> list[torch.Tensor]:
        taken = [one.view(self._word) for selection in self._selections for one in selection.take()]
        content = torch.cat([*taken, self._zero])
        return [content.index_select(0, sources).view(torch.uint8) for *_, sources in self._spans]


class Selection:
    """The largest elements of the residuals of those parameters of a pool that have gradients."""

    def __init__(self, layout: Layout, pool: Pool, present: Sequence[int]) -> None:
        self._pool, self._layout = pool, layout
        here = set(present)
        self._numbers = [number for number in pool.parts if number in here]
        self._small = [number for number in self._numbers if number in pool.sparse_parts]
        self._large = self._numbers[len(self._small) :]
        self._residuals = [in_shape(pool.parts[number], layout, number) for number in self._numbers]
        self._left = [in_shape(pool.sparse_parts[number], layout, number) for number in self._small]
        self._counts = [layout.parts[number].kept for number in self._numbers]
        begins = np.array([pool.parts[number].storage_offset() for number in self._numbers], np.int64)
        small = zip(self._small, begins, self._counts)  # their elements come first, sorted within each parameter
        picked = np.concatenate([np.arange(0), *(begin + np.arange(count) for _, begin, count in small)])
        self._starts = torch.from_numpy(np.repeat(begins, self._counts)).to(pool.flat.device)
        self._picked = torch.from_numpy(picked).to(pool.flat.device)

    def places(self) -> Iterator[tuple[int, int]]:
        """The places in a row of the bytes that `take` returns, and their numbers."""
        parts = [self._layout.parts[number] for number in self._numbers]
        yield from ((one.values, one.kept * self._pool.dtype.itemsize) for one in parts)
        yield from ((one.indices, one.kept * self._pool.index_dtype.itemsize) for one in parts)

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add the gradients to the residuals."""
        if self._numbers:
            torch._foreach_add_(self._residuals, [gradients[number] for number in self._numbers])

    def take(self) -> tuple[torch.Tensor, ...]:
        """Take the largest elements of each residual, which become 0. Which of equal elements is taken is not defined.

        Returns their values, and their indices in the memory of each parameter, parameter by parameter; nothing if
        there are no parameters.
        """
        if not self._numbers:
            return ()
        pool, small = self._pool, len(self._picked)
        there = self._largest()
        values, indices = pool.flat[there], there - self._starts
        pool.flat.index_fill_(0, there, 0)
        if self._small:
            pool.sparse.zero_().scatter_(0, there[:small], values[:small])
        self._taken = dict(zip(self._numbers, zip(indices.split(self._counts), values.split(self._counts))))
        return values, indices.to(pool.index_dtype)

    def _largest(self) -> torch.Tensor:
        """The places of the largest elements in the pool: for small parameters by one sort."""
        found, pool = [], self._pool
        if self._small:
            size = pool.flat[: len(pool.keys)].abs().float().view(torch.int32)  # as integers they have the same order
            found.append(torch.sort(pool.keys - size).indices[self._picked])
        for number in self._large:
            part = pool.parts[number]
            found.append(largest(part, self._layout.parts[number].kept) + part.storage_offset())
        return torch.cat(found)

    def leave(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Let the gradients have only the elements that were taken."""
        if self._small:
            torch._foreach_copy_([gradients[number] for number in self._small], self._left)
        if self._large:
            torch._foreach_zero_([gradients[number] for number in self._large])
        for number in self._large:
            put(gradients[number], self._layout.strides[number], *self._taken[number])


@contextmanager
def collection_disabled() -> Iterator[None]:
    """No garbage is collected meanwhile: a graph that is destroyed makes the capture of another one fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of the numbers that follow each other without a gap."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def put(gradient: torch.Tensor, strides: Sequence[int], chosen: torch.Tensor, kept: torch.Tensor) -> None:
    """Put kept elements into a gradient of zeros; chosen: their indices in a memory order that has these strides."""
    if gradient.stride() == tuple(strides):
        in_memory_order(gradient).scatter_(0, chosen, kept)
    else:
        sparse = gradient.new_zeros(gradient.numel()).scatter_(0, chosen, kept)
        gradient.copy_(sparse.as_strided(gradient.shape, strides))


def in_shape(flat: torch.Tensor, layout: Layout, number: int) -> torch.Tensor:
    """A view of a flat tensor with the shape of a parameter, in the order of the parameter's memory."""
    return flat.as_strided(layout.parameters[number].shape, layout.strides[number])


def in_one_launch(device: torch.device) -> bool:
    """Whether the number of operations costs more than their size."""
    return device.type == "cuda"


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a tensor without gaps, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def largest(flat: torch.Tensor, count: int) -> torch.Tensor:
    """The indices (int64) of the elements with the largest magnitude; which of equal ones is chosen is not defined."""
    size = flat.abs()
    if count >= len(flat):
        return torch.arange(len(flat), device=flat.device)
    if len(flat) > _SMALL and not in_one_launch(flat.device):  # a GPU would be waited for
        sample = size[::_SAMPLED]
        place = int(len(sample) * (1 - _SAFE * count / len(flat)))
        threshold = sample.kthvalue(max(1, place)).values
        over = size.float().numpy() > float(threshold)  # torch takes some six times as long for this
        candidates = torch.from_numpy(np.flatnonzero(over))
        if len(candidates) >= count:
            return candidates[_topk(size[candidates], count)]
    return _topk(size, count)


def _topk(size: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(size, count, sorted=False).indices
