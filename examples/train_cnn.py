"""A convolutional network learns digits, is killed again and again, and ends with the bits of an undisturbed training.

python examples/train_cnn.py [KILLS]

Every iteration's gradients are logged (pmstore.torch.GradLog). Each process goes on where the last commit was, in the
middle of an epoch, with the same dropout, the same order of the data and the same learning rate.

Needs the extras of pmstore: pip install 'pmstore[sklearn,torch]'
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import pmstore
from pmstore.torch import BatchSampler, GradLog

EPOCHS, BATCH = 6, 64
TRAINED = 1500  # digits; the others are for the test


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 9, 10),
    )


def learn(path: str) -> None:
    """Train to the end, or until this process is killed. Prints each iteration, and the result."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images.float() / 16).reshape(-1, 1, 8, 8)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    data = BatchSampler(TRAINED, BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(data))
    with pmstore.open(path) as store:
        log = GradLog(net, optimizer, store, scheduler=scheduler, data=data, batch=5, max_iter=EPOCHS * len(data))
        log.resume()
        print(f"resumed {log.iteration}", flush=True)
        for _ in range(data.epoch, EPOCHS):
            for batch in data:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(images[batch]), digits[batch])
                loss.backward()
                print(log.step(loss.item()), flush=True)
        log.finish()
    net.eval()
    right = (net(images[TRAINED:]).argmax(1) == digits[TRAINED:]).double().mean()
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in net.state_dict().values()))
    print(f"accuracy {right:.3f}, bits {digest.hexdigest()[:16]}", flush=True)


def trained(path: Path, kill_after: int | None) -> str:
    """Run a process, and kill it after some iterations. Returns its last line."""
    line = ""
    command = [sys.executable, __file__, "--learn", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number, text in enumerate(process.stdout):
            line = text.strip()
            if number == 0 and not line.endswith(" 0"):
                print(f"  goes on after iteration {line.split()[1]}")
            if number == kill_after:
                process.kill()
    return line


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with tempfile.TemporaryDirectory() as folder:
        print("undisturbed:")
        undisturbed = trained(Path(folder, "undisturbed.pm"), None)
        print(f"  {undisturbed}")
        print("killed:")
        for _ in range(kills):
            last = trained(Path(folder, "killed.pm"), random.randrange(10, 40))
            print(f"  killed at iteration {last}")
        killed = trained(Path(folder, "killed.pm"), None)
        print(f"  {killed}")
        losses = pmstore.history(Path(folder, "killed.pm"), "training")["objective"]
        print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} iterations")
    if killed != undisturbed:
        raise SystemExit("the results differ")
    print("the same bits")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--learn"]:
        learn(sys.argv[2])
    else:
        main()
