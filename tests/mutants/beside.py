"""Readers beside the process that writes: mutants, and the part of the battery that notices them."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Medium
from tests.core.test_readers import (
    assert_snapshots_are_commits,
    test_large_contents_that_a_record_in_the_log_changes,
)
from tests.core.test_readers_hashes import (
    assert_hashes_are_of_a_commit,
    test_contents_in_another_slot_have_the_same_hashes_and_another_digest,
    test_I20_hashes_and_digests_tell_what_changed,
)
from tests.mutants.anew import opener
from tests.mutants.build import Mutant
from tests.store import test_backup
from tests.support.crashes import OPTIONS, bulky, full, laps, names, overflow, record, reuse
from tests.support.crashes_slots import slots

PAGES, SOURCE = "csrc/reader/pages.c", "csrc/reader/source.c"
CONTENTS, SAVE = "csrc/reader/contents.c", "csrc/reader/save.c"
BACKUP = "pmstore/_store/backup.py"

NOTICED = [
    Mutant(
        "old-records-not-applied-to-new-copies",
        "B",
        PAGES,
        "i < t->source.found.count",
        "false",
        "a snapshot has a page of an older commit",
    ),
    Mutant(
        "new-records-not-applied",
        "B",
        PAGES,
        "apply(t, i, &t->loaded, &none);",
        "",
        "a snapshot has a page of an older commit",
    ),
    Mutant(
        "snapshot-applies-runs-over-direct-writes",
        "B",
        PAGES,
        "pm_page_hashes_at(declared, page) <= record + 1",
        "true",
        "a snapshot has the bytes of a deleted array",
    ),
    Mutant(
        "snapshot-ends-although-a-commit-came",
        "B",
        PAGES,
        "source->store.log.header.generation != generation || source->store.log.sequence != sequence",
        "source->store.log.header.generation != generation",
        "a snapshot lacks what a commit has added meanwhile",
    ),
    Mutant(
        "declared-pages-stay-copied",
        "B",
        PAGES,
        "pm_page_set_clear(&t->loaded, first, end);",
        "",
        "a snapshot has the bytes of a deleted array",
        within="pm_page_set_clear(&t->loaded, first, end);\n        for (uint64_t page = first + pm_extent_table",
    ),
    Mutant(
        "snapshot-keeps-the-slot-of-the-header",
        "B",
        PAGES,
        "pm_log_choose_slot(&t->source.store.log, (unsigned)(slot / 2), slot % 2);",
        "",
        "a snapshot has an array of an older commit",
    ),
    Mutant(
        "commits-missed-when-the-log-is-emptied",
        "B",
        SOURCE,
        "now.header.sequence != log->sequence",
        "false",
        "a snapshot has pages of several commits",
    ),
    Mutant(
        "snapshot-of-a-commit-that-is-not-durable",
        "B",
        SOURCE,
        "return add_records(source, newest(&now), missed);",
        "{ pm_status status = add_records(source, UINT64_MAX, missed); *missed = false; return status; }",
        "a snapshot has pages of several commits",
    ),
    Mutant(
        "later-contents-not-verified",
        "B",
        CONTENTS,
        "pm_contents_hash(snapshot, p, block, bytes) != hashes[block - p->first]",
        "false",
        "an array of a snapshot is of a later commit",
    ),
    Mutant(
        "table-not-verified",
        "B",
        CONTENTS,
        "!pm_page_hashes_fit(&snapshot->tables, first, to, pm_pages_used(first, extent_end))",
        "false",
        "an array of a snapshot is of a later commit",
    ),
    Mutant(
        "digest-of-the-first-page",
        "B",
        CONTENTS,
        "page * PM_PAGE < end",
        "page == table / PM_PAGE",
        "contents that have changed have the digest of those before",
    ),
    Mutant(
        "hashes-bound-to-their-place",
        "B",
        "csrc/reader/snapshot.c",
        "out[block] = pm_keyed_checksum(hashes[block], p.place + block * PM_PAGE, snapshot->store_id);",
        "out[block] = hashes[block];",
        "equal blocks in two slots count as changed",
    ),
    Mutant(
        "table-that-the-log-changes-not-copied",
        "F",
        PAGES,
        "if (pm_page_set_has(&t->changed, page)) PM_TRY(need(t, page, page + 1, true));",
        "",
        "a sound store counts as damaged",
    ),
    Mutant(
        "table-that-was-changed-counts-as-it-was",
        "F",
        PAGES,
        "for (uint64_t page = first; page < end; page++) pm_page_hashes_remove(&t->tables, page);",
        "",
        "an array of a snapshot counts as changed",
    ),
    Mutant(
        "backup-of-blocks-that-changed",
        "F",
        SAVE,
        "*whole &= note(s, block, next)",
        "note(s, block, next)",
        "a backup has contents of several commits",
    ),
    Mutant(
        "backup-keeps-blocks-of-an-extent-that-was-deleted",
        "F",
        BACKUP,
        "self.there = {one: self.there.get(one) or snapshot.hashes(one[1]) for one in extents}",
        "self.there = {**self.there, **{one: self.there.get(one) or snapshot.hashes(one[1]) for one in extents}}",
        "a sound store counts as damaged",
    ),
    Mutant(
        "backup-without-pages-of-the-log",
        "F",
        PAGES,
        "if (t->changing) PM_TRY(need_changed(t));",
        "",
        "a sound store counts as damaged",
    ),
    Mutant(
        "backup-of-a-damaged-store",
        "F",
        BACKUP,
        "newest(self.fd) <= core.sequence",
        "False",
        "a backup of a damaged store never ends",
    ),
]
MUTANTS = [mutant._replace(parts=("beside",)) for mutant in NOTICED]


def beside(directory: Path) -> None:
    for number, (medium, workload) in enumerate(
        (medium, workload) for medium in ("memory", "file") for workload in (names, reuse, slots, overflow, laps, full)
    ):
        recording = record(directory / f"{number}.pm", medium, workload, readers=False, **OPTIONS.get(workload, {}))
        for seed in (1, 2):
            for most in (2, 60):
                assert_snapshots_are_commits(recording, directory / "played.pm", seed, most)
    for medium in ("memory", "file"):
        recording = record(directory / f"{medium}.pm", medium, bulky, readers=False)
        for seed in range(4):
            assert_snapshots_are_commits(recording, directory / "played.pm", seed, 10)
            assert_hashes_are_of_a_commit(recording, directory / "played.pm", seed, 10)
            test_backup.assert_backups_are_commits(recording, directory / "played.pm", seed)
        for evaluate in (
            test_large_contents_that_a_record_in_the_log_changes,
            test_I20_hashes_and_digests_tell_what_changed,
            test_contents_in_another_slot_have_the_same_hashes_and_another_digest,
        ):
            evaluate(Medium(medium, directory))
            (directory / "store.pm").unlink()
    for evaluate in (test_backup.test_a_damaged_store_has_no_backup, test_backup.test_contents_that_come_back):
        evaluate(opener(directory / evaluate.__name__))
