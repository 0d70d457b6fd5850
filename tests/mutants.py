"""Every planted bug, and the controls, which are no bugs; how to run them: tests/mutation_score.py."""

from __future__ import annotations

from tests import (
    mutants_async,
    mutants_background,
    mutants_commit,
    mutants_forks,
    mutants_log,
    mutants_media,
    mutants_slots,
    mutants_space,
)
from tests.mutants_build import Mutant

MUTANTS: list[Mutant] = [
    *mutants_log.MUTANTS,
    *mutants_commit.MUTANTS,
    *mutants_space.MUTANTS,
    *mutants_slots.MUTANTS,
    *mutants_async.MUTANTS,
    *mutants_background.MUTANTS,
    *mutants_media.MUTANTS,
    *mutants_forks.MUTANTS,
]
CONTROLS: list[Mutant] = mutants_media.CONTROLS
