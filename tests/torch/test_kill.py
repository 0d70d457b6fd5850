"""A training that is killed by SIGKILL, at any moment, ends with the same bits."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import torch

import pmstore
from tests.support.template import template
from tests.torch.training import OPTIMIZING, train

RUNS = 5
ITERATIONS = 60


def main(path: str) -> None:
    """Train, and print the iteration whenever one is done, then a digest of everything."""
    torch.set_num_threads(1)
    with pmstore.open(path) as store:
        result = train(
            store,
            lambda net: torch.optim.Adam(net.parameters(), 0.01),
            ITERATIONS,
            batch=3,
            full_every=9,
            reached=lambda log, net: print(log.iteration, log.durable, flush=True),
        )
    parts = [*result["model"].values(), *result["generators"], result["history"]]
    states = result["optimizer"]["state"]
    parts += [states[number][key] for number in sorted(states) for key in sorted(states[number])]
    digest = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts))
    print(digest.hexdigest(), flush=True)


def trained(path: Path, kill_after: int) -> str:
    """Run until a number of lines, and kill it then: "", or the digest if it came to its end."""
    code = "import sys; from tests.torch.test_kill import main; main(sys.argv[1])"
    process = template([*OPTIMIZING, "tests.torch.test_kill"]).start("-c", code, path)
    last = ""
    for number, line in enumerate(process.stdout):
        last = line.strip()
        if " " in last:
            iteration, durable = map(int, last.split())
            assert 0 <= iteration - durable < 3
        if number == kill_after:
            process.kill()
    process.communicate()
    return last if len(last) == 64 else ""


def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole.pm", -1)
    assert whole
    draws = random.Random(3)
    runs = 0
    while not (ended := trained(tmp_path / "killed.pm", draws.randrange(4, 20) if runs < RUNS else -1)):
        runs += 1
    assert (ended, runs) == (whole, RUNS)
