"""A training that is killed by SIGKILL, at any moment, ends with the same bits."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch

import pmstore
from tests.torch.training import train

LIVES = 5
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


def life(path: Path, kill_after: int) -> str:
    """Run until a number of lines, and kill it then: "", or the digest if it came to its end."""
    command = [sys.executable, "-m", "tests.torch.test_kill", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        durable, last = -1, ""
        for number, line in enumerate(process.stdout):
            last = line.strip()
            if " " in last:
                iteration, durable = map(int, last.split())
                assert 0 <= iteration - durable < 3
            if number == kill_after:
                process.send_signal(signal.SIGKILL)
        return last if len(last) == 64 else ""


def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = life(tmp_path / "whole.pm", -1)
    assert whole
    draws = random.Random(3)
    lives = 0
    while not (ended := life(tmp_path / "killed.pm", draws.randrange(4, 20) if lives < LIVES else -1)):
        lives += 1
    assert (ended, lives) == (whole, LIVES)


if __name__ == "__main__":
    main(sys.argv[1])
