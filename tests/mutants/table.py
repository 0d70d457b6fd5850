"""Every mutant of the battery, and the controls, which are no bugs; tests/mutants/score.py runs them."""

from __future__ import annotations

from tests.mutants import (
    anew,
    archives,
    asynchronous,
    background,
    beside,
    commit,
    forks,
    formats,
    growing,
    log,
    media,
    slots,
    space,
)
from tests.mutants.build import Mutant

MUTANTS: list[Mutant] = [
    *log.MUTANTS,
    *commit.MUTANTS,
    *space.MUTANTS,
    *slots.MUTANTS,
    *asynchronous.MUTANTS,
    *background.MUTANTS,
    *media.MUTANTS,
    *forks.MUTANTS,
    *anew.MUTANTS,
    *beside.MUTANTS,
    *archives.MUTANTS,
    *growing.MUTANTS,
    *formats.MUTANTS,
]
CONTROLS: list[Mutant] = media.CONTROLS
