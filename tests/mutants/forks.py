"""Mutants of the state that a forked child continues to see."""

from __future__ import annotations

from tests.mutants.build import Mutant

FORK, HEAP, REGION = "csrc/space/region_fork.c", "csrc/space/heap.c", "csrc/space/region.c"

MUTANTS = [
    mutant._replace(parts=("forks",))
    for mutant in (
        Mutant(
            "fork-without-pages-of-its-own",
            "P",
            FORK,
            "if (from >= to || pm_address_own(region->live + from, to - from)) return;",
            "return;",
            "a forked child sees what its parent commits",
        ),
        Mutant(
            "fork-leaves-out-the-last-page",
            "P",
            FORK,
            "if (from >= to || pm_address_own(region->live + from, to - from)) return;",
            "if (from >= to || pm_address_own(region->live + from, to - from - PM_PAGE)) return;",
            "a forked child sees what its parent commits to an array's last page",
        ),
        Mutant(
            "fork-takes-every-array-for-fixed",
            "P",
            FORK,
            "return buffer->fixed && buffer->committed && buffer->offset % PM_PAGE == 0;",
            "return buffer->committed && buffer->offset % PM_PAGE == 0;",
            "a forked child sees what its parent commits to an array that can be written",
        ),
        Mutant(
            "fork-locks-another-byte",
            "P",
            FORK,
            "fork",
            "fork - 1",
            "every fork copies what can't change",
            within=".l_start = fork, .l_len = 1};",
        ),
        Mutant(
            "fork-keeps-what-is-pending",
            "PR",
            FORK,
            "return buffer->fixed && buffer->committed && buffer->offset % PM_PAGE == 0;",
            "return buffer->fixed && buffer->offset % PM_PAGE == 0;",
            "a forked child sees what a recovery writes over an array that was not committed",
        ),
        Mutant(
            "fork-tells-a-smaller-region",
            "P",
            FORK,
            "((int64_t)(region->size / PM_PAGE) << NUMBER_BITS)",
            "((int64_t)(region->size / PM_PAGE / 2) << NUMBER_BITS)",
            "a forked child sees what the next opening stores",
        ),
        Mutant(
            "fork-notes-the-first-only",
            "P",
            FORK,
            "buffer->last_fork = fork;",
            "if (!buffer->last_fork) buffer->last_fork = fork;",
            "a second forked child sees what takes the place of an array, once the first one is gone",
        ),
        Mutant(
            "fork-forgotten-where-space-is-sought",
            "P",
            REGION,
            "if (atomic_load(&buffer->living) || pm_region_fork_may_show(region, buffer)) end = buffer_end;",
            "if (atomic_load(&buffer->living)) end = buffer_end;",
            "a forked child sees what takes the place of an array",
        ),
        Mutant(
            "fork-forgotten-at-the-next-commit",
            "P",
            REGION,
            "atomic_load(&buffer->living) || !buffer->done || buffer->last_fork",
            "atomic_load(&buffer->living) || !buffer->done",
            "a forked child sees what takes the place of an array",
        ),
        Mutant(
            "fork-forgotten-for-many-arrays",
            "P",
            REGION,
            "atomic_load(&buffer->living) || candidate || pm_region_fork_may_show(region, buffer)",
            "atomic_load(&buffer->living) || candidate",
            "a forked child sees what takes the place of an array, where many arrays live",
        ),
        Mutant(
            "children-of-an-earlier-opening-not-looked-for",
            "P",
            FORK,
            "region->shown_to_children = region->media->read_only || region->media->lent ? 0 : shown(region);",
            "region->shown_to_children = 0;",
            "a forked child sees what the next opening stores",
        ),
        Mutant(
            "children-of-an-earlier-opening-passed-over",
            "P",
            HEAP,
            "if (start < children) start = children;",
            "if (start < children) start += 0;",
            "a forked child sees what the next opening stores",
        ),
        Mutant(
            "space-kept-for-children-that-are-gone",
            "W",
            FORK,
            "if (child_lives(region, buffer->first_fork, last)) return true;",
            "return true;",
            "a file grows with every child",
        ),
    )
]
