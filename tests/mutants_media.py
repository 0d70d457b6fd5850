"""Planted bugs of the media, of the making of stores, and of the Python side."""

# ruff: noqa: E501

from __future__ import annotations

from tests.mutants_build import Mutant, part

FILE, MEMORY, MEDIA, STORE = "csrc/media_file.c", "csrc/media_memory.c", "csrc/media.c", "csrc/store.c"
OPENING, TRANSACTION, CATALOG = "pmstore/_opening.py", "pmstore/_transaction.py", "pmstore/_catalog.py"
STORE_PY, LIST = "pmstore/_store.py", "pmstore/_list.py"

MEMORY_MEDIUM = [
    Mutant(
        "stream-edges-not-flushed",
        "R",
        MEMORY,
        "flush_##manner(media, to);",
        ";",
        "the lines that a streamed range begins and ends in are lost",
        also=(part(MEMORY, "flush_##manner(media, (to) + (length) - 1);", ";"),),
    ),
    Mutant(
        "stream-tail-forgotten",
        "P",
        MEMORY,
        "if (length) EDGE(manner, to, from, length);",
        ";",
        "the last bytes of a range are not written",
    ),
    Mutant(
        "flush-rounded-down",
        "R",
        MEMORY,
        "(offset + length + PM_LINE - 1) / PM_LINE",
        "(offset + length) / PM_LINE - 1",
        "the last line of a range is not flushed",
    ),
    Mutant(
        "fence-forgotten",
        "R",
        MEMORY,
        "memory_order(media);",
        ";",
        "nothing is ordered",
    ),
    Mutant(
        "write-through-without-fence",
        "R",
        MEMORY,
        "return memory_fence(media);",
        "return PM_OK;",
        "an acknowledged commit is lost",
    ),
    Mutant(
        "write-through-cached",
        "R",
        MEMORY,
        "memory_write(media, offset, source, length, PM_WRITE_STREAM)",
        "memory_write(media, offset, source, length, PM_WRITE_CACHED)",
        "a header, or a record, stays in the cache",
    ),
    Mutant(
        "streams-cached",
        "R",
        MEMORY,
        "how == PM_WRITE_STREAM",
        "false",
        "what was streamed stays in the cache",
    ),
    Mutant(
        "memory-grows-without-space",
        "M",
        MEMORY,
        "PM_TRY(pm_media_reserve(media, media->size, size));",
        "if (pm_media_reserve(media, media->size, size)) (void)0;",
        "a full tmpfs is a crash at a store",
    ),
]

FILE_MEDIUM = [
    Mutant(
        "sync-forgotten",
        "R",
        FILE,
        "return sync_all(media, fdatasync) ? sync_failed() : PM_OK;",
        "return PM_OK;",
        "nothing is ordered",
    ),
    Mutant(
        "sync-error-ignored",
        "M",
        FILE,
        "return sync_all(media, fdatasync) ? sync_failed() : PM_OK;",
        "(void)sync_all(media, fdatasync); return PM_OK;",
        "an acknowledged commit is lost",
    ),
    Mutant(
        "sync-retried",
        "M",
        FILE,
        "return sync_all(media, fdatasync) ? sync_failed() : PM_OK;",
        "return sync_all(media, fdatasync) && sync_all(media, fdatasync) ? sync_failed() : PM_OK;",
        "a sync that failed is taken for one that did not",
    ),
    Mutant(
        "sync-error-called-lack-of-space",
        "M",
        FILE,
        "return PM_IO;",
        "return PM_NO_SPACE;",
        "the caller goes on after a sync that failed",
        within='pm_fail_errno("cannot sync the file");\n    return PM_IO;',
    ),
    Mutant(
        "write-through-without-sync",
        "R",
        FILE,
        "return file_fence(media);",
        "return PM_OK;",
        "an acknowledged commit is lost",
    ),
    Mutant(
        "write-error-ignored",
        "M",
        FILE,
        'if (done < 0) return pm_fail_errno("cannot write to the file");',
        "if (done < 0) return PM_OK;",
        "bytes that were never written are acknowledged",
    ),
    Mutant(
        "short-write-believed",
        "M",
        FILE,
        "from += done, offset += (uint64_t)done, length -= (size_t)done;",
        "length = 0;",
        "half of a range is written",
    ),
    Mutant(
        "short-write-repeated-in-place",
        "M",
        FILE,
        "from += done, offset += (uint64_t)done, length -= (size_t)done;",
        "from += done, length -= (size_t)done;",
        "the rest of a range overwrites its beginning",
    ),
    Mutant(
        "file-size-not-updated",
        "P",
        FILE,
        "media->size = size;",
        ";",
        "the store writes where it may not",
        within="return sync_failed();\n        media->size = size;",
    ),
]

CREATION = [
    Mutant(
        "empty-region-not-durable",
        "FR",
        STORE,
        "if (status == PM_OK) status = media.operations->fence(&media);",
        ";",
        "a header that vouches for pages that are not there",
    ),
    Mutant(
        "header-of-a-new-store-first",
        "FP",
        STORE,
        "if (status == PM_OK) status = media.operations->grow(&media, PM_REGION_START + FIRST_REGION + log_size);",
        "if (status == PM_OK) status = media.operations->grow(&media, PM_REGION_START + FIRST_REGION + log_size);"
        " if (status == PM_OK) { uint8_t *early = calloc(PM_HEAP_FIRST_PAGES, PM_PAGE); pm_heap_format(early, 1);"
        " pm_catalog_format(early, (PM_HEAP_FIRST_PAGES - 1) * PM_PAGE, 1);"
        " status = pm_log_format(&media, FIRST_REGION, log_size, 1, pm_heap_digest(early)); free(early); }",
        "half a store opens",
    ),
    Mutant(
        "file-not-synced-before-it-is-named",
        "F",
        OPENING,
        "os.fsync(fd)",
        "pass",
        "an acknowledged store is empty",
        within="_core.format_file(fd, media, trace)\n            os.fsync(fd)",
    ),
    Mutant(
        "directory-not-synced",
        "F",
        OPENING,
        "_sync_directory(directory)",
        "pass",
        "an acknowledged store is missing",
        within="raise _Changed from None\n        _sync_directory(directory)",
    ),
    Mutant(
        "named-before-it-is-written",
        "F",
        OPENING,
        "_core.format_file(fd, media, trace)\n            os.fsync(fd)\n            _rename(temporary, real, replace=replaced is not None)",
        "_rename(temporary, real, replace=replaced is not None)\n            _core.format_file(fd, media, trace)\n            os.fsync(fd)",
        "half a store has the name",
    ),
    Mutant(
        "replaced-store-deleted-first",
        "F",
        OPENING,
        "os.replace(temporary, real)",
        "os.unlink(real)\n        os.rename(temporary, real)",
        "a crash leaves neither the old store nor the new one",
    ),
    Mutant(
        "open-store-replaced",
        "F",
        OPENING,
        "_refuse_if_noted(inode, path, writing)",
        "pass",
        "a store that is open is replaced",
        within="_refuse_if_noted(inode, path, writing)\n            lock_fd",
        also=(part(OPENING, "_lock(lock_fd, path, writing)", "pass"),),
    ),
    Mutant(
        "temporary-file-left",
        "F",
        OPENING,
        "os.unlink(temporary)",
        "pass",
        "creating leaves a file",
        within="else:\n        os.unlink(temporary)",
    ),
]

PYTHON = [
    Mutant(
        "exception-commits",
        "W",
        TRANSACTION,
        "store._rollback_now()\n            finished = True",
        "store._commit_now()\n            finished = True",
        "a transaction that an exception left is committed",
        within="elif kind is not None:\n            store._rollback_now()\n            finished = True",
    ),
    Mutant(
        "doomed-commits",
        "W",
        TRANSACTION,
        "kind is not None and not turn.doomed",
        "False",
        "an outer transaction commits what an inner one gave up",
        within="if kind is not None and not turn.doomed:\n                turn.doomed = _INNER_FAILED\n            finished = True",
    ),
    Mutant(
        "inner-transaction-commits",
        "P",
        TRANSACTION,
        "turn.depth > 1",
        "False",
        "half of a transaction is committed, or rolled back",
        within="elif turn.depth > 1:\n            if kind is not None",
    ),
    Mutant(
        "closing-does-not-commit",
        "W",
        STORE_PY,
        "self._commit_now(closing=True)",
        "pass",
        "changes are lost when a store is closed",
    ),
    Mutant(
        "list-ids-reused",
        "W",
        CATALOG,
        'self.core.put(_names.LIST_ID_KEY, Entry(0, 0, INLINE, 0, self._next_list.to_bytes(8, "little")))',
        "pass",
        "a new list holds an old one's elements",
    ),
    Mutant(
        "old-elements-kept-by-assignment",
        "W",
        CATALOG,
        "self.put_encoded(key, encoded, type_name(value), self._elements_of(existing))",
        "self.put_encoded(key, encoded, type_name(value))",
        "elements of a list that was replaced are left",
    ),
    Mutant(
        "arrays-stay-writable-after-close",
        "W",
        CATALOG,
        "array.flags.writeable = False",
        "pass",
        "writes to an array of a closed store go nowhere",
    ),
]

CONTROLS = [
    Mutant("control-code-that-never-runs", "-", FILE, "errno = ENOSPC;", "errno = EIO;", ""),
    Mutant(
        "control-a-fence-more",
        "-",
        "csrc/log.c",
        "PM_TRY(pm_media_write(media, place, &record, sizeof record, PM_WRITE_STREAM));",
        "PM_TRY(media->operations->fence(media));"
        " PM_TRY(pm_media_write(media, place, &record, sizeof record, PM_WRITE_STREAM));",
        "",
    ),
    Mutant(
        "control-a-clean-line-flushed",
        "-",
        "csrc/log.c",
        "log->head = 0;",
        "log->head = 0; log->media->operations->flush(log->media, PM_REGION_START, PM_PAGE);",
        "",
    ),
    Mutant(
        "control-record-before-its-body",
        "-",
        "csrc/log.c",
        "PM_TRY(pm_media_write(media, place + sizeof record + writer->written, staged(writer, writer->written),\n"
        "                              body - writer->written + padding, PM_WRITE_STREAM));",
        "PM_TRY(pm_media_write(media, place, &record, sizeof record, PM_WRITE_STREAM));"
        " PM_TRY(pm_media_write(media, place + sizeof record + writer->written, staged(writer, writer->written),"
        " body - writer->written + padding, PM_WRITE_STREAM));",
        "",
    ),
    Mutant(
        "control-a-sync-twice",
        "-",
        FILE,
        "return sync_all(media, fdatasync) ? sync_failed() : PM_OK;",
        "if (sync_all(media, fdatasync)) return sync_failed(); return sync_all(media, fdatasync) ? sync_failed() : PM_OK;",
        "",
    ),
    Mutant(
        "control-a-larger-reserve",
        "-",
        MEDIA,
        "wanted < RESERVE_LEAST",
        "(wanted *= 2) < RESERVE_LEAST",
        "",
    ),
    Mutant(
        "control-growth-synced-by-what-follows",
        "-",
        FILE,
        "if (sync_all(media, fsync)) return sync_failed();",
        ";",
        "",
    ),
    Mutant(
        "control-new-log-not-written-once",
        "-",
        "csrc/transaction.c",
        "PM_TRY(write_log_once(store, log_offset > old_end ? log_offset : old_end, end));",
        ";",
        "",
    ),
    Mutant(
        # Each copy describes a state that can be recovered, until the other one is written too.
        "control-older-header-copy-chosen",
        "-",
        "csrc/log.c",
        "copies[1].generation > best->generation",
        "copies[1].generation < best->generation",
        "",
    ),
    Mutant(
        # What stands before and behind the whole lines of a range lies in one line each, which is flushed already.
        "control-edges-flushed-once",
        "-",
        MEMORY,
        "flush_##manner(media, (to) + (length) - 1);",
        ";",
        "",
    ),
    Mutant(
        "control-home-written-twice",
        "-",
        "csrc/transaction.c",
        "PM_TRY(failed(store, apply_home(store, body, length)));",
        "PM_TRY(failed(store, apply_home(store, body, length))); PM_TRY(failed(store, apply_home(store, body, length)));",
        "",
    ),
]

MUTANTS = [*MEMORY_MEDIUM, *FILE_MEDIUM, *CREATION, *PYTHON]
