"""Planted bugs of background work: writes past the page cache, home behind a commit. Letters: docs/crash-model.md."""

from __future__ import annotations

from tests.mutants_build import Mutant

DIO, LOG, HOME, STORE = "csrc/media_dio.c", "csrc/log.c", "csrc/transaction_home.c", "csrc/store.c"
ASYNC = "csrc/transaction_async.c"

MUTANTS = [
    Mutant(
        "completions-not-awaited",
        "O",
        DIO,
        "not_done(dio) > 0",
        "false",
        "a record is durable before its parts are written",
    ),
    Mutant(
        "one-completion-too-few",
        "O",
        DIO,
        "not_done(dio) > 0",
        "not_done(dio) > 1",
        "a record is durable before one of its parts is written",
    ),
    Mutant(
        "failed-completion-ignored",
        "M",
        DIO,
        "dio->results[i] != (int64_t)dio->writes[i].aio_nbytes",
        "false",
        "a part that the disk did not write is taken for written",
    ),
    Mutant(
        "short-completion-believed",
        "M",
        DIO,
        "dio->results[i] != (int64_t)dio->writes[i].aio_nbytes",
        "dio->results[i] < 0",
        "a part of which the disk wrote half is taken for written",
    ),
    Mutant(
        "stage-slides-before-its-parts-have-left",
        "P",
        LOG,
        "writer->status = writer->media->operations->settle(writer->media);",
        ";",
        "the disk fetches bytes that have moved",
        within=(
            "before it has arrived. The first page waited for a header that comes by\n"
            "             * itself now. */\n"
            "            writer->status = writer->media->operations->settle(writer->media);"
        ),
    ),
    Mutant(
        "home-not-awaited",
        "O",
        HOME,
        "while (store->behind.busy) pm_wait(&store->behind.done, &store->mutex);",
        ";",
        "a call goes on while home is brought up to date with the last commit",
    ),
    Mutant(
        "home-left-behind",
        "O",
        STORE,
        "store->closed ? PM_OK : pm_home_catch_up(store)",
        "PM_OK",
        "a call finds home of the commit before",
    ),
    Mutant(
        "busy-not-said",
        "O",
        HOME,
        "store->behind.busy = true;",
        ";",
        "nobody waits for the thread that brings home up to date",
    ),
    Mutant(
        "spilled-body-s-space-given-back",
        "P",
        HOME,
        "behind->spilled ? pm_transaction_checkpoint(store, false) : begin_now_and_then(store, before)",
        "begin_now_and_then(store, before)",
        "the log refers to free pages, which are used again (I9)",
    ),
    Mutant(
        "failed-write-back-not-asked-about",
        "O",
        HOME,
        'return refused ? pm_failed(store, pm_fail(PM_IO, "a part of the file could not be written back")) : PM_OK;',
        "return PM_OK;",
        "contents are taken for durable among pages that the kernel could not write",
    ),
    Mutant(
        "write-back-under-way-not-awaited",
        "O",
        HOME,
        "while (behind->is_asking) pm_wait(&behind->asked, &behind->asking);",
        ";",
        "contents are taken for durable before a write-back of theirs has failed",
    ),
    Mutant(
        "durable-before-home-shows-it",
        "P",
        ASYNC,
        "status = settle_records(store);",
        "store->log.durable = async->snapshot; status = settle_records(store);",
        "a slot is written while an older run for it waits (I13)",
    ),
    Mutant(
        "close-without-the-last-sync",
        "M",
        STORE,
        "return store->async ? pm_failed(store, store->media.operations->sync(&store->media)) : PM_OK;",
        "return PM_OK;",
        "close() has said that all is durable",
    ),
    Mutant(
        "thread-does-not-come-back",
        "M",
        ASYNC,
        "schedule(store, pm_now(store->schedule) + async->interval);",
        ";",
        "commits never become durable by themselves again",
        within="schedule(store, pm_now(store->schedule) + async->interval);\n    async->scheduled = true;\n}",
    ),
    Mutant(
        "commit-before-the-rollback-that-is-due",
        "P",
        STORE,
        "store->rollback_due = true;",
        ";",
        "what a rollback was to undo is committed (I11)",
    ),
    Mutant(
        "sync-awaited-before-it-is-done",
        "O",
        ASYNC,
        "while (!async->done) pm_wait(&async->changed, &async->mutex);",
        ";",
        "home changes before the commits up to the snapshot are durable",
    ),
]
