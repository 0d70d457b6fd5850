"""Planted bugs of extents with two slots. The letters: docs/crash-model.md."""

# ruff: noqa: E501

from __future__ import annotations

from tests.mutants_build import Mutant, part

RECOVERY, TRANSACTION, SLOTS = "csrc/recovery.c", "csrc/transaction.c", "csrc/slots.c"
COMMITS = "csrc/transaction_slots.c"
LOG, REGION = "csrc/log.c", "csrc/region.c"

MUTANTS = [
    Mutant(
        "slot-over-the-current-one",
        "P",
        COMMITS,
        "1 - dense->home",
        "dense->home",
        "the last durable state is written over",
        within="unsigned to = 1 - dense->home;\n    PM_CHECK",
    ),
    Mutant(
        "slot-not-declared",
        "P",
        COMMITS,
        (
            "pm_writer_direct(&store->writer, dense->gone ? PM_ITEM_DIRECT : PM_ITEM_SLOT, dense->slot[to], dense->length,\n"
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
        "if (!dense->gone) pm_log_choose_slot(&store->log, dense->entry, dense->home ^ dense->base);",
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
        "if (!is_direct(&item)) continue;",
        "if (item.kind != PM_ITEM_DIRECT) continue;",
        "a commit whose slot was torn is adopted",
        within="for (uint64_t cursor = 0; *sound && pm_log_next(body->body, body->length, &cursor, &item);) {\n        if (!is_direct(&item)) continue;",
    ),
    Mutant(
        "slot-declared-for-nothing",
        "L",
        RECOVERY,
        "if (!is_direct(&item)) continue;",
        "if (item.kind != PM_ITEM_DIRECT) continue;",
        "a few changes that were logged are replayed over a later whole commit (I8)",
        within="for (uint64_t cursor = 0; pm_log_next(found->bodies[i].body, found->bodies[i].length, &cursor, &item);) {\n            if (!is_direct(&item)) continue;",
    ),
    Mutant(
        "slot-not-made-durable",
        "N",
        RECOVERY,
        "is_direct(&item)",
        "(item.kind == PM_ITEM_DIRECT)",
        "what recovery adopts from the page cache is lost to a power cut",
        within="if (is_direct(&item)) PM_TRY(write_again(",
    ),
    Mutant(
        "slot-rolled-back-from-the-seat",
        "C",
        REGION,
        "home == offset",
        "(home || offset)",
        "a rollback shows the commit before the last",
        within="if (offset % PM_PAGE == 0 && home == offset) {",
    ),
    Mutant(
        "slot-released-to-the-seat",
        "W",
        "csrc/region_read.c",
        "(home == offset || !memcmp(region->live + at, region->home + home + (at - offset), PM_PAGE))",
        "(home || offset)",
        "memory that equals an old commit is taken for clean",
        also=(
            part(
                "csrc/region_read.c",
                "!memcmp(region->live + at, region->home + at, PM_PAGE)",
                "!memcmp(region->live + at, region->home + home + (at - offset), PM_PAGE)",
                within="if (at < end && !pm_is_unsettled(region, at) && !memcmp(region->live + at, region->home + at, PM_PAGE) &&",
            ),
            part(COMMITS, "!dense || dense->home == dense->seat", "true"),
        ),
    ),
    Mutant(
        "slot-cooled-into-the-wrong-one",
        "P",
        COMMITS,
        "if (dense->gone) return dense->home;",
        "if (dense->gone) return false;",
        "an array that cools down keeps the older bytes",
    ),
    Mutant(
        "slot-removal-not-rolled-back",
        "C",
        SLOTS,
        "region->dense[i]->gone = false;",
        ";",
        "a deletion that was rolled back forgets which slot is current",
    ),
    Mutant(
        "slot-freed-but-named",
        "W",
        SLOTS,
        "table->pairs[dense->entry % PM_SLOTS_PER_PAGE] = (pm_slot_pair){0};",
        ";",
        "check() finds a pair that no entry owns",
    ),
    Mutant(
        "slot-leaks",
        "W",
        SLOTS,
        "PM_TRY(pm_heap_free(region, dense->slot[1], dense->length));",
        ";",
        "check() finds pages that nothing uses",
    ),
    Mutant(
        "slot-without-digest",
        "W",
        COMMITS,
        "*digest = pm_digest_plus(*digest, pm_digest_minus(dense->written_terms, dense->terms));",
        ";",
        "check() finds that the digest differs",
    ),
    Mutant(
        "slot-terms-out-of-date",
        "W",
        COMMITS,
        "dense->known_terms = false;",
        ";",
        "after a few changes, check() finds that the digest differs",
    ),
    Mutant(
        "slot-compared-with-the-seat",
        "W",
        TRANSACTION,
        "dense ? dense->slot[dense->home] : buffer->offset",
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
