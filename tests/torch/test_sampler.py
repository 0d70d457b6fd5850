"""BatchSampler and Seeded: the order of the data, and the position in it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from pmstore.torch import BatchSampler, Seeded


def epoch_of(sampler: BatchSampler) -> list[list[int]]:
    """All batches that an iteration over the sampler has, each of which is done."""
    found = []
    for batch in sampler:
        found.append([int(index) for index in batch])
        sampler.advance()
    return found


@given(
    samples=st.integers(1, 40),
    size=st.integers(1, 12),
    shuffle=st.booleans(),
    drop=st.booleans(),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_an_epoch_has_each_sample_once(
    samples: int, size: int, shuffle: bool, drop: bool, ranks: int, seed: int
) -> None:
    batches = (samples // size if drop else -(-samples // size)) // ranks

    def made(rank: int) -> BatchSampler:
        return BatchSampler(samples, size, shuffle=shuffle, drop_last=drop, seed=seed, rank=rank, world_size=ranks)

    if not batches:
        with pytest.raises(ValueError, match="no batch"):
            made(0)
        return
    epochs = [[epoch_of(sampler) for _ in range(2)] for sampler in map(made, range(ranks))]
    for epoch in range(2):
        every = [batch for rank in epochs for batch in rank[epoch]]
        indices = [index for batch in every for index in batch]
        assert len(indices) == len(set(indices))
        assert len(every) == batches * ranks
        if ranks == 1 and not drop:
            assert sorted(indices) == list(range(samples))
        if not shuffle:
            assert sorted(indices) == sorted(range(samples))[: len(indices)] or ranks > 1 or drop


@given(done=st.integers(0, 14), seed=st.integers(0, 3))
def test_a_resumed_sampler_goes_on_where_training_was(done: int, seed: int) -> None:
    whole = BatchSampler(23, 5, seed=seed)
    order = [batch for _ in range(4) for batch in epoch_of(whole)]
    first = BatchSampler(23, 5, seed=seed)
    seen: list[list[int]] = []
    while len(seen) < done:
        for batch in first:
            if len(seen) == done:
                break
            seen.append(batch)
            first.advance()
    second = BatchSampler(23, 5, seed=seed)
    second.load_state_dict(first.state_dict())
    epochs = [second.epoch]
    for _ in range(6):
        seen += epoch_of(second)
        epochs.append(second.epoch)
    assert [list(map(int, batch)) for batch in seen][: len(order)] == order
    # An epoch that was done is empty once, so that a loop over epochs sees its end.
    assert epochs[0] == epochs[1] == (max(done - 1, 0) // 5)


class Noisy(Dataset[Any]):
    """Each sample has noise from all generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(torch.rand(())), np.random.rand(), random.random()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_seeded_dataset_are_the_same_after_a_resume(workers: int) -> None:
    def batches(sampler: BatchSampler, most: int) -> list[torch.Tensor]:
        data = DataLoader(Seeded(Noisy()), batch_sampler=sampler, num_workers=workers, generator=sampler.generator)
        found = []
        while len(found) < most:
            for batch in data:
                found.append(batch)
                sampler.advance()
                if len(found) == most:
                    break
        return found

    whole = batches(BatchSampler(12, 4, seed=1), 8)
    first, second = BatchSampler(12, 4, seed=1), BatchSampler(12, 4, seed=1)
    torch.manual_seed(9)
    begun = batches(first, 5)
    state = torch.get_rng_state()
    second.load_state_dict(first.state_dict())
    torch.manual_seed(4)
    resumed = batches(second, 3)
    assert torch.equal(torch.stack(whole), torch.stack(begun + resumed))
    assert len({tuple(row.tolist()) for row in torch.cat(whole)}) == 8 * 4
    torch.manual_seed(9)
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn from torch's generator


def test_what_is_refused() -> None:
    for arguments in ((0, 1), (5, 0)):
        text = "the number of samples and batch_size must be at least 1, not {} and {}".format(*arguments)
        with pytest.raises(ValueError, match=text):
            BatchSampler(*arguments)
    with pytest.raises(ValueError, match="rank is from 0"):
        BatchSampler(5, 1, rank=2, world_size=2)
    with pytest.raises(TypeError):
        BatchSampler(object(), 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BatchSampler(5, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed is a number from 0, not -1"):
        BatchSampler(5, 2, seed=-1)
    sampler = BatchSampler(np.int64(5), 2)
    assert epoch_of(sampler) == epoch_of(BatchSampler(5, 2))
    sampler.load_state_dict(BatchSampler(5, 2).state_dict())
    with pytest.raises(ValueError, match="4 batches are done, but epoch 0 has 3 left"):
        sampler.advance(4)
    with pytest.raises(ValueError, match="seed: 0 ≠ 1"):
        BatchSampler(5, 2, seed=1).load_state_dict(sampler.state_dict())
    with pytest.raises(TypeError, match="batch_sampler=BatchSampler"):
        Seeded(Noisy())[3]


def test_seeded_leaves_the_generators_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not put back."""

    def refused(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refused)
    monkeypatch.setattr(torch.cuda, "manual_seed", refused)
    sampler, before = BatchSampler(6, 2), torch.get_rng_state()
    assert len(list(DataLoader(Seeded(Noisy()), batch_sampler=sampler, generator=sampler.generator))) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loop_that_knows_its_epoch_gets_no_empty_one() -> None:
    done = BatchSampler(8, 4)
    first, second = epoch_of(done), epoch_of(done)
    resumed = BatchSampler(8, 4)
    epoch_of(resumed)
    state = resumed.state_dict()
    resumed.load_state_dict(state)
    assert epoch_of(resumed) == [] and epoch_of(resumed) == second != first
    resumed.load_state_dict(state)
    resumed.end_epoch()
    assert epoch_of(resumed) == second


@pytest.mark.parametrize("counts", [False, True])
def test_batches_that_are_left_out(counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One that is not counted comes again, with a warning."""
    sampler, seen = BatchSampler(10, 2, shuffle=False), []
    for _ in range(2):
        for batch in sampler:
            seen.append(int(batch[0]))
            if batch[0] != 4 or counts:
                sampler.advance()
    assert seen == [0, 2, 4, 6, 8, 0, 2, 4, 6, 8] if counts else seen == [0, 2, 4, 6, 8, 8]
    assert ("1 batches of epoch 0 were drawn" in caplog.text) == (not counts)


def test_a_loop_that_is_left_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    sampler = BatchSampler(10, 2)
    for _ in range(3):
        for _ in sampler:
            sampler.advance()
            break
    assert sampler.position == 3 and not caplog.text
    again = BatchSampler(10, 2)
    again.load_state_dict(sampler.state_dict())
    assert len(epoch_of(again)) == 2 and len(epoch_of(again)) == 5 and not caplog.text
