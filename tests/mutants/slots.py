"""Mutants of extents with two slots. The letters: docs/crash-model.md."""

# ruff: noqa: E501

from __future__ import annotations

from tests.mutants.build import Mutant, part

RECOVERY, TRANSACTION, SLOTS = "csrc/recovery/recovery.c", "csrc/commit/transaction.c", "csrc/space/slots.c"
COMMITS = "csrc/commit/write_slots.c"
LOG, REGION = "csrc/log/log.c", "csrc/space/region.c"
CANDIDATES = "csrc/commit/candidates.c"

MUTANTS = [
    Mutant(
        "slot-over-the-current-one",
        "P",
        COMMITS,
        "1 - pair->current",
        "pair->current",
        "the last durable state is written over",
        within="unsigned to = 1 - pair->current;\n    PM_CHECK",
    ),
    Mutant(
        "slot-not-declared",
        "P",
        COMMITS,
        (
            "pm_writer_direct(&store->writer, pair->gone ? PM_ITEM_DIRECT : PM_ITEM_SLOT, pair->slot[to], pair->length,\n"
            "                         direct);"
        ),
        ";",
        "a commit is forgotten",
    ),
    Mutant(
        "slot-choice-not-in-the-header",
        "N",
        LOG,
        "memcpy(next.slots, log->slots, sizeof next.slots);",
        "memcpy(next.slots, log->header.slots, sizeof next.slots);",
        "after a checkpoint the older slot is shown",
    ),
    Mutant(
        "slot-choice-not-noted",
        "L",
        COMMITS,
        "if (!pair->gone) pm_log_choose_slot(&store->log, pair->entry, pair->current ^ pair->base);",
        ";",
        "after a checkpoint the older slot is shown",
    ),
    Mutant(
        "slot-choice-not-replayed",
        "P",
        RECOVERY,
        "pm_log_choose_slot(&store->log, (unsigned)(slot / 2), slot % 2);",
        "(void)slot;",
        "recovery shows the older slot",
    ),
    Mutant(
        "slot-choice-of-any-record",
        "P",
        RECOVERY,
        "pm_log_choose_slot(&store->log, (unsigned)(slot / 2), slot % 2);",
        "if (!i) pm_log_choose_slot(&store->log, (unsigned)(slot / 2), slot % 2);",
        "only the first record's choice counts",
    ),
    Mutant(
        "slot-not-verified",
        "R",
        RECOVERY,
        "if (!pm_log_is_direct(&item)) continue;",
        "if (item.kind != PM_ITEM_DIRECT) continue;",
        "a commit whose slot was torn is adopted",
        within="for (uint64_t cursor = 0; *valid && pm_log_next(body->body, body->length, &cursor, &item);) {\n        if (!pm_log_is_direct(&item)) continue;",
    ),
    Mutant(
        "slot-declared-for-nothing",
        "L",
        RECOVERY,
        "if (!pm_log_is_direct(&item)) continue;",
        "if (item.kind != PM_ITEM_DIRECT) continue;",
        "a few changes that were logged are replayed over a later whole commit (I8)",
        within="for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {\n            if (!pm_log_is_direct(&item)) continue;",
    ),
    Mutant(
        "slot-not-made-durable",
        "N",
        RECOVERY,
        "pm_log_is_direct(&item)",
        "(item.kind == PM_ITEM_DIRECT)",
        "what recovery adopts from the page cache is lost to a power cut",
        within="if (pm_log_is_direct(&item))\n            PM_TRY(write_again(",
    ),
    Mutant(
        "slot-rolled-back-from-the-mapped-slot",
        "C",
        REGION,
        "committed == offset",
        "(committed || offset)",
        "a rollback shows the commit before the last",
        within="if (offset % PM_PAGE == 0 && committed == offset) {",
    ),
    Mutant(
        "slot-released-to-the-mapped-slot",
        "W",
        "csrc/space/region_read.c",
        "(committed == offset || !memcmp(region->live + at, region->committed + committed + (at - offset), PM_PAGE))",
        "(committed || offset)",
        "memory that equals an old commit is taken for clean",
        also=(
            part(
                "csrc/space/region_read.c",
                "!memcmp(region->live + at, region->committed + at, PM_PAGE)",
                "!memcmp(region->live + at, region->committed + committed + (at - offset), PM_PAGE)",
                within="if (at < end && !pm_overlay_covers(region, at) && !memcmp(region->live + at, region->committed + at, PM_PAGE) &&",
            ),
            part(COMMITS, "!pair || pair->current == pair->mapped", "true"),
        ),
    ),
    Mutant(
        "slot-cooled-into-the-wrong-one",
        "P",
        COMMITS,
        "if (pair->gone) return pair->current;",
        "if (pair->gone) return false;",
        "an array that cools down keeps the older bytes",
    ),
    Mutant(
        "slot-removal-not-rolled-back",
        "C",
        SLOTS,
        "region->double_buffers[i]->gone = false;",
        ";",
        "a deletion that was rolled back forgets which slot is current",
    ),
    Mutant(
        "slot-freed-but-named",
        "W",
        SLOTS,
        "table->pairs[slots->entry % PM_SLOTS_PER_PAGE] = (pm_slot_pair){0};",
        ";",
        "check() finds a pair that no entry owns",
    ),
    Mutant(
        "slot-leaks",
        "W",
        SLOTS,
        "PM_TRY(pm_heap_free(region, slots->slot[1], slots->length));",
        ";",
        "check() finds pages that nothing uses",
    ),
    Mutant(
        "slot-without-digest",
        "W",
        COMMITS,
        "*digest = pm_digest_plus(*digest, pm_digest_minus(pair->written_contributions, pair->contributions));",
        ";",
        "check() finds that the digest differs",
    ),
    Mutant(
        "slot-contributions-out-of-date",
        "W",
        COMMITS,
        "pair->known_contributions = false;",
        ";",
        "after a few changes, check() finds that the digest differs",
    ),
    Mutant(
        "slot-compared-with-the-mapped-slot",
        "W",
        CANDIDATES,
        "pair ? pair->slot[pair->current] : buffer->offset",
        "buffer->offset",
        "a few changes are compared with, and logged over, the older slot",
    ),
    Mutant(
        "slot-opened-at-the-first",
        "N",
        SLOTS,
        "current[entry / 64] >> entry % 64 & 1",
        "current[entry / 64] >> entry % 64 & 0",
        "the older slot is shown",
    ),
]
