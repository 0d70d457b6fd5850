"""A training that is killed by SIGKILL, at any moment, ends with the same bits."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch

import pmstore
from tests.support.template import template
from tests.torch.training import OPTIMIZING, train

RUNS = 5
ITERATIONS = 60


def main(path: str, mode: str, device: str) -> None:
    """Train, and print the iteration whenever one is done, then a digest of everything."""
    torch.set_num_threads(1)
    with pmstore.open(path) as store:
        result = train(
            store,
            lambda net: torch.optim.Adam(net.parameters(), 0.01),
            ITERATIONS,
            mode=mode,
            device=device,
            batch=3,
            full_every=9 if mode == "dense" else "auto",
            reached=lambda log, net: print(log.iteration, log.durable, flush=True),
        )
    parts = [*result["model"].values(), *result["generators"], result["history"]]
    states = result["optimizer"]["state"]
    parts += [states[number][key] for number in sorted(states) for key in sorted(states[number])]
    digest = hashlib.sha256(b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts))
    print(digest.hexdigest(), flush=True)


def trained(path: Path, kill_after: int, mode: str, durable: int = 0, device: str = "cpu") -> tuple[str, int]:
    """Run until a number of lines, and kill it then.

    Returns "", or the digest if it came to its end, and the iterations that it called durable. durable: what the run
    before returned.
    """
    code = "import sys; from tests.torch.test_kill import main; main(*sys.argv[1:])"
    process = template([*OPTIMIZING, "tests.torch.test_kill"]).start("-c", code, path, mode, device)
    last = ""
    for number, line in enumerate(process.stdout):
        last = line.strip()
        if " " in last:
            least, (iteration, durable) = durable, map(int, last.split())
            assert least <= durable and 0 <= iteration - durable <= 3 - (mode == "dense")
        if number == kill_after:
            process.kill()
    process.communicate()
    return last if len(last) == 64 else "", durable


@pytest.mark.parametrize("mode", ["dense", "replica"])
def test_a_killed_training_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole.pm", -1, "dense")
    assert whole
    draws = random.Random(3)
    ended, durable = "", 0
    for _ in range(RUNS):
        ended, durable = trained(tmp_path / "killed.pm", draws.randrange(4, 20), mode, durable)
        assert not ended
    assert trained(tmp_path / "killed.pm", -1, mode, durable)[0] == whole
