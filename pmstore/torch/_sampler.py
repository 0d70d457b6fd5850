"""The order of the data, and how far training is in it."""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch

__all__ = ["BatchSampler", "Seeded"]

logger = logging.getLogger("pmstore")


class BatchSampler:
    """Batches of indices whose position survives a crash, for ``DataLoader(dataset, batch_sampler=…)``.

    The order of an epoch is a function of the seed and the number of the epoch. The position is that of the batches
    that training has *done*, which `GradLog.step` counts, so that batches that workers of a DataLoader have fetched
    ahead are not lost.

    Parameters
    ----------
    data : Sized or int
        The dataset, or the number of its samples.
    batch_size : int
    shuffle : bool, default=True
    drop_last : bool, default=False
        Whether a last batch with fewer samples is left out.
    seed : int, default=0
        From 0.
    rank, world_size : int, default=0, 1
        This process takes each world_size-th batch, beginning with batch `rank`; all ranks have the same number of
        batches, so up to world_size - 1 batches of an epoch are left out.

    Attributes
    ----------
    epoch : int
        The number of the epoch that the next iteration over the sampler belongs to. A loop over epochs begins with it:
        ``for epoch in range(sampler.epoch, epochs)``.
    position : int
        The number of batches of the epoch that are done.
    generator : torch.Generator
        Give it to the DataLoader as well. A DataLoader without a generator draws a number from torch's own generator
        for each iteration over it, also for the one after a resume. Training then draws other numbers.

    Raises ValueError or TypeError for sizes below 1, a negative seed, or an epoch without a batch.

    Examples
    --------
    >>> sampler = BatchSampler(10, 4, shuffle=False)
    >>> list(sampler)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._samples = len(data) if isinstance(data, Sized) else operator.index(data)
        batch_size = operator.index(batch_size)
        if seed < 0:
            raise ValueError(f"seed is a number from 0, not {seed}")
        if self._samples < 1 or batch_size < 1:
            raise ValueError(
                f"the number of samples and batch_size must be at least 1, not {self._samples} and {batch_size}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is from 0 to world_size - 1 = {world_size - 1}, not {rank}")
        self._batch_size, self._shuffle, self._drop_last, self._seed = batch_size, shuffle, drop_last, int(seed)
        self._rank, self._world_size = rank, world_size
        every = self._samples // batch_size if drop_last else -(-self._samples // batch_size)
        self._batches = every // world_size
        if not self._batches:
            raise ValueError(
                f"{self._samples} samples make no batch of {batch_size} for each of {world_size} processes"
            )
        self.epoch = self.position = 0
        self._resumed = False
        self._drawn = -1  # the epoch whose last batch was drawn last
        self.generator = torch.Generator().manual_seed(self._seed)

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the epoch that are not done yet. After the last one of an epoch, those of the next."""
        if self.position >= self._batches and not self._resumed:
            self.epoch, self.position = self.epoch + 1, 0
        elif self._drawn == self.epoch and 0 < self.position < self._batches:
            logger.warning(
                "BatchSampler: %d batches of epoch %d were drawn and are not counted as done, so that they come again: "
                "step(batches=…) counts those of a step, and advance() those that are left out",
                self._batches - self.position,
                self.epoch,
            )
        self._resumed = False  # an epoch that was done when training resumed is empty once, so that its end is seen
        order = self._order(self.epoch)
        first, epoch = self.position, self.epoch
        for number in range(first, self._batches):
            begin = (number * self._world_size + self._rank) * self._batch_size
            places = range(begin, min(begin + self._batch_size, self._samples))
            yield [_Index(int(order[place]), (self._seed, epoch, place)) for place in places]
        self._drawn = epoch

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        if not self._shuffle:
            return np.arange(self._samples)
        bits = np.random.MT19937(np.random.SeedSequence((self._seed, epoch)))
        return np.random.RandomState(bits).permutation(self._samples)  # numpy keeps its bits in all versions

    def advance(self, batches: int = 1) -> None:
        """Count batches as done. `GradLog.step` calls it for the sampler that it was given as `data`.

        A loop that leaves out a batch, for example because its loss is not finite, calls it as well.

        Raises ValueError if the epoch has fewer batches left.
        """
        self._check(batches)
        self.position += batches
        if batches:
            self._resumed = False  # the loop that does them sees the end of the epoch itself

    def _check(self, batches: int) -> None:
        if not 0 <= batches <= self._batches - self.position:
            raise ValueError(
                f"{batches} batches are done, but epoch {self.epoch} has {self._batches - self.position} left of "
                f"{self._batches}: step() takes the number of batches since the last step"
            )

    def end_epoch(self) -> None:
        """Let the next iteration over the sampler begin the next epoch, if all batches of this one are done.

        After a resume, the epoch that was done comes once more, without a batch, so that a loop sees its end. This call
        is for loops that know the epoch from elsewhere, as those of frameworks do.
        """
        self._resumed = self._resumed and self.position < self._batches

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the position, and the settings that the order depends on."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "samples": self._samples,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "seed": self._seed,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at that position. Raises ValueError, which names the differences, if the order would be another
        one."""
        own = self.state_dict()
        other = [
            f"{key}: {state.get(key)!r} ≠ {own[key]!r}"
            for key in own
            if key not in ("epoch", "position") and state.get(key) != own[key]
        ]
        if other:
            raise ValueError(f"the order of the data is another one; stored ≠ now: {', '.join(other)}")
        self.epoch, self.position, self._resumed = state["epoch"], state["position"], True
        self._drawn = -1

    def _go_back(self, state: dict[str, Any]) -> None:
        """Continue at that position after a rollback, within the loop that is going on.

        Raises ValueError as `load_state_dict` does.
        """
        # load_state_dict resumes: if the epoch is done, its end comes once more, as an epoch without a batch. A loop
        # that goes on after a rollback counts that empty epoch as one of its own, and so leaves one out. It has seen
        # the end if it has begun a later epoch, which then begins anew. If the epoch is the same and done, nothing has
        # changed since the commit. Then the end is still to come only if it was before, as in a new process.
        is_later, resumed = self.epoch > state["epoch"], self._resumed
        self.load_state_dict(state)
        self._resumed = resumed
        if is_later and self.position == self._batches:
            self.epoch, self.position = self.epoch + 1, 0


class _Index(int):
    """The index of a sample, which knows when it is drawn."""

    draw: tuple[int, int, int]

    def __new__(cls, index: int, draw: tuple[int, int, int]) -> _Index:
        made = super().__new__(cls, index)
        made.draw = draw
        return made

    def __getnewargs__(self) -> tuple[int, tuple[int, int, int]]:  # type: ignore[override]
        return int(self), self.draw


class Seeded(torch.utils.data.Dataset[Any]):
    """A dataset with random transforms, whose samples are the same however often training was killed.

    The generators of torch (of the CPU), numpy and random are seeded for each sample, from the seed of the
    `BatchSampler`, the epoch and the place in it. In the process that trains they are put back afterwards.

    Parameters
    ----------
    dataset : map-style dataset
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """The sample. Raises TypeError for an index that does not come from a `BatchSampler`."""
        if not isinstance(index, _Index):
            raise TypeError("the indices of a Seeded dataset come from DataLoader(…, batch_sampler=BatchSampler(…))")
        words = [int(word) for word in np.random.SeedSequence(index.draw).generate_state(4)]
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(words[0] | words[1] << 32)  # torch.manual_seed seeds all GPUs, too
        np.random.seed(words[2])
        random.seed(words[3])
        try:
            return self._dataset[int(index)]
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])
