"""Functions that run as the ranks of a process group on this machine."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tests.support.template import template
from tests.torch.training import OPTIMIZING

RANKS = 2
WAIT = timedelta(seconds=120)  # a rank that waits for another one in vain ends with an error


def ended(function: Callable[..., None], *arguments: Any, ranks: int = RANKS) -> list[int]:
    """The exit statuses of processes that call function(rank, *arguments), a function of a module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = template([*OPTIMIZING, "tests.torch.ranks", function.__module__]).start
    what = function.__module__, function.__name__, arguments
    processes = [
        start("-c", f"from tests.torch.ranks import call; call{(rank, ranks, port, *what)}") for rank in range(ranks)
    ]
    for process in processes:
        process.communicate(timeout=300)
    return [process.wait() for process in processes]


def call(rank: int, ranks: int, port: int, module: str, name: str, arguments: tuple[Any, ...]) -> None:
    """One process.

    The function returns, so that its model is gone before the process group. Where a DistributedDataParallel is the
    last that refers to gloo's group, torch waits for the group's threads with Python's lock held, and a thread that
    lets go of a tensor waits for the lock (pytorch issue 56297).
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, timeout=WAIT)
    getattr(importlib.import_module(module), name)(rank, *arguments)
    torch.distributed.destroy_process_group()
