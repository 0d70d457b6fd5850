"""A schedule: which accidents happen, as a function of a seed.

The simulation asks at numbered *points* whether an accident happens there: at each message, at the beginning and the
end of each map, before and after each call of the engine and each commit. A schedule has a bounded set of points, and a
set of accidents that it chooses from. Behind the last point nothing happens any more: this is the assumption under
which each fit must end.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from pmstore.testing._base.errors import CrashTestError

MESSAGE = ("dropped", "delayed", "repeated")
DAMAGE = ("altered", "altered hash", "another shard's", "cut", "a number of no shard")
REPLY = (*MESSAGE, "held back", *DAMAGE, "impure")
MAP = ("killed", "stopped", "slow", "not loaded", "given up", "changed")
ANSWERED = ("killed", "stopped")
COORDINATOR = ("coordinator killed",)
LOCAL = ("machine lost", "bits rot")
"""More of MAP for algorithms with local fields: a worker is killed and its disk is empty then, or has damage."""
COMMIT = ("killed in a commit",)

KINDS = tuple(dict.fromkeys((*REPLY, *MAP, *COORDINATOR)))
RARE = ("impure", "changed")
"""The accidents that end a fit with an error, if noticed: a map that is no function, a shard with other contents."""


@dataclass(frozen=True)
class Schedule:
    """The accidents that a seed decides.

    Attributes
    ----------
    seed : int
    points : frozenset of int
        Where accidents happen.
    kinds : tuple of str
        The accidents that are chosen from.
    """

    seed: int
    points: frozenset[int]
    kinds: tuple[str, ...]
    holds: bool = True  # whether workers have room for shards; else they load them for each question
    together: bool = False  # whether all workers have one disk
    stale: bool = False  # whether the disks have stores of another run at the beginning
    archived: int = 0  # epochs between two copies of a local state; 0: there is no archive

    def __str__(self) -> str:
        return f"{self.seed}:{','.join(map(str, sorted(self.points)))}"

    def only(self, points: frozenset[int]) -> Schedule:
        """The same with other points: an accident at a point is the same in both."""
        return dataclasses.replace(self, points=points)


def schedule(seed: int, length: int, faults: int, local: bool) -> Schedule:
    """The schedule of a seed.

    Parameters
    ----------
    length : int
        The number of points of an undisturbed run.
    faults : int
        The largest number of accidents.
    local : bool
        Whether the algorithm has local fields.
    """
    chance = random.Random(seed)
    kinds = [kind for kind in (*KINDS, *(LOCAL + COMMIT if local else ())) if kind not in RARE]
    chosen = chance.sample(kinds, chance.choice((1, 2, 3, len(kinds))))
    holds = chance.random() < 0.7
    kind_of_schedule = chance.random()
    if kind_of_schedule < 0.07:
        chosen = ["impure", *chance.choice(((), ("held back",), ("coordinator killed",)))]
    elif kind_of_schedule < 0.15:
        chosen, holds = ["changed", *chance.choice(((), ("killed",)))], chance.random() < 0.3
    elif kind_of_schedule < 0.35:  # messages for one coordinator reach another one
        chosen = ["coordinator killed", chance.choice(("held back", "slow", "delayed", "stopped"))]
    elif local and kind_of_schedule < 0.6:  # what one worker has, another one needs
        chosen = [*LOCAL, *COMMIT, "killed", chance.choice(("coordinator killed", "slow", "stopped", "held back"))]
    begin = chance.randrange(length)
    end = begin + chance.choice((8, length, 2 * length))  # some in a row, others anywhere
    count = chance.randint(1, faults)
    points = frozenset(chance.randrange(begin, end) for _ in range(count))
    together, stale = (chance.random() < 0.4, chance.random() < 0.3) if local else (False, False)
    archived = chance.choice((0, 0, 1, 2)) if local else 0
    return Schedule(seed, points, tuple(chosen), holds, together, stale, archived)


def parse(text: str, length: int, faults: int, local: bool) -> Schedule:
    """The schedule that ``str`` made text of; a seed alone is the whole schedule of that seed."""
    seed, colon, points = text.partition(":")
    try:
        whole = schedule(int(seed), length, faults, local)
        return whole.only(frozenset(map(int, filter(None, points.split(","))))) if colon else whole
    except ValueError:
        raise CrashTestError(
            f"only= is a schedule as a failure names it, such as '7:12,40', not {text!r:.80}"
        ) from None
