"""Mutants of background work: writes past the page cache, deferred write-back. Letters: docs/crash-model.md."""

from __future__ import annotations

from tests.mutants.build import Mutant

DIO, LOG, STORE = "csrc/media/direct_io.c", "csrc/log/log.c", "csrc/store/store.c"
WRITE_BACK = "csrc/commit/write_back.c"
ASYNC = "csrc/commit/async.c"
WRITER = "csrc/log/writer.c"

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
        WRITER,
        "writer->status = writer->media->operations->await_writes(writer->media);",
        ";",
        "the disk fetches bytes that have moved",
        within=(
            "writer->status = writer->media->operations->await_writes(writer->media);\n"
            "            if (writer->status == PM_OK)"
        ),
    ),
    Mutant(
        "image-not-awaited",
        "O",
        WRITE_BACK,
        "while (store->write_back.busy) pm_thread_wait(&store->write_back.done, &store->mutex);",
        ";",
        "a call goes on while the committed image is brought up to date with the last commit",
    ),
    Mutant(
        "write-back-left-out",
        "O",
        STORE,
        "store->closed ? PM_OK : pm_write_back_drain(store)",
        "PM_OK",
        "a call finds the committed image of the commit before",
    ),
    Mutant(
        "busy-not-said",
        "O",
        WRITE_BACK,
        "store->write_back.busy = true;",
        ";",
        "nobody waits for the thread that brings the committed image up to date",
    ),
    Mutant(
        "write-back-thread-hands-nothing-over",
        "R",
        WRITE_BACK,
        "pm_media_memory_hand_over(&store->media);",
        ";",
        "the fence of a later checkpoint does not order what the thread has streamed",
    ),
    Mutant(
        "call-hands-nothing-over",
        "R",
        "csrc/store/store.c",
        "pm_media_memory_hand_over(&store->media);",
        ";",
        "the fence of another thread's commit does not order what a call has streamed",
    ),
    Mutant(
        "overflowed-body-s-space-given-back",
        "P",
        WRITE_BACK,
        "write_back->overflowed ? pm_checkpoint_make(store, false) : pm_image_begin_write_back(store, before)",
        "pm_image_begin_write_back(store, before)",
        "the log refers to free pages, which are used again (I9)",
    ),
    Mutant(
        "durable-before-image-shows-it",
        "P",
        ASYNC,
        "status = finalize_records(store);",
        "store->log.durable = async->snapshot; status = finalize_records(store);",
        "a slot is written while an older logged range for it waits (I13)",
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
        "schedule(store, pm_thread_now(store->schedule) + async->interval);",
        ";",
        "commits never become durable by themselves again",
        within="schedule(store, pm_thread_now(store->schedule) + async->interval);\n    async->scheduled = true;\n}",
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
        "while (!async->done) pm_thread_wait(&async->changed, &async->mutex);",
        ";",
        "the committed image changes before the commits up to the snapshot are durable",
    ),
    Mutant(
        "recovered-store-does-not-await-its-image",
        "ON",
        WRITE_BACK,
        "while (store->write_back.busy) pm_thread_wait(&store->write_back.done, &store->mutex);",
        "while (store->write_back.busy && !store->statistics.records_replayed)"
        " pm_thread_wait(&store->write_back.done, &store->mutex);",
        "after a crash, a call goes on while the committed image is brought up to date",
    ),
    Mutant(
        "recovered-store-syncs-nothing-in-the-background",
        "ON",
        ASYNC,
        "PM_TRY(media->operations->sync(media));",
        "if (!store->statistics.records_replayed) PM_TRY(media->operations->sync(media));",
        "after a crash, commits are said to be durable that are not",
        within="PM_TRY(media->operations->sync(media));\n    PM_TRY(pm_log_durable_marker(",
    ),
    Mutant(
        "runs-after-a-crash-without-background-work",
        "O",
        "csrc/explore/evaluate.c",
        "pm_trace_background(trace, seed, how.pace)",
        "PM_OK",
        "of a crash in or after a recovery, only one order of writes is tried",
        parts=("write_back",),
    ),
]
