"""Workers of engines that start in milliseconds: forks, as tests/support/template.py makes them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from pmstore.scale import _processes
from tests.support.template import WITH_ESTIMATORS, Own, Template, template

MODULES = (*WITH_ESTIMATORS, "pmstore.scale._worker")


class Forking:
    """What `_processes` uses of subprocess. template_for: the template of workers with such an environment.

    A template belongs to one process. In forks of that process, which tests kill, the workers are new processes.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self, template_for: Callable[[dict[str, str]], Template]) -> None:
        self._template_for, self._process = template_for, os.getpid()

    def Popen(self, command: list[str], pass_fds: Sequence[int], stdin: int, env: dict[str, str]) -> Any:
        if os.getpid() != self._process:
            return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, env=env)
        own: Own = self._template_for(env).own(*command[1:], pass_fds=pass_fds)
        return own


def forking() -> Forking:
    """The workers of a process that has computed with several threads: its template is a new process."""

    def template_for(env: dict[str, str]) -> Template:
        return template(MODULES, **{name: env[name] for name in env if name.endswith("_NUM_THREADS")})

    return Forking(template_for)


def fork_workers() -> None:
    """Make the workers of this process forks of it, as it is now: it has one thread and all modules."""
    own = Template.here()
    _processes.subprocess = Forking(lambda env: own)  # type: ignore[assignment]
