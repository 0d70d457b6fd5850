"""Formats and features of a file: mutants, and the part of the battery that notices them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Medium
from tests.golden import test_upgrade
from tests.mutants.build import Mutant

LOG, SOURCE, COMPACTING = "csrc/log/log.c", "csrc/reader/source.c", "pmstore/_store/compacting.py"
FORMAT = "pmstore/_store/file_format.py"

NOTICED = [
    Mutant(
        "format-0-checksum-ignored",
        "T",
        LOG,
        "header->write_features == pm_crc32c(header, offsetof(pm_header, write_features), 0)",
        "true",
        "a damaged header of format 0 is used",
    ),
    Mutant(
        "format-0-read-as-1",
        "W",
        LOG,
        "memset((uint8_t *)header + end, 0, sizeof *header - end);",
        ";",
        "a store of format 0 is refused, because its checksum is taken for features",
    ),
    Mutant(
        "unknown-features-ignored",
        "W",
        LOG,
        "header->features",
        "false",
        "a store is read that means something else",
        within="if (header->features)",
    ),
    Mutant(
        "unknown-write-features-ignored",
        "W",
        LOG,
        "header->write_features && !read_only",
        "false",
        "a store is written without what its feature needs",
    ),
    Mutant(
        "later-format-believed",
        "W",
        LOG,
        "header->version <= PM_FORMAT_VERSION",
        "true",
        "a store of a later format is read as one of this",
    ),
    Mutant(
        "compacted-without-unknown-features",
        "W",
        COMPACTING,
        "refuse_unknown_features(held.fd, name)  # the new file would lack what they mean",
        "pass",
        "a compacted store lacks what its feature needs",
    ),
    Mutant(
        "upgrade-of-a-closed-store-left-out",
        "W",
        FORMAT,
        "core.checkpoint()",
        "pass",
        "an upgraded store has the old format",
    ),
    Mutant(
        "declared-by-an-overflow-not-read",
        "B",
        SOURCE,
        "if (overflow && unsure) PM_TRY(read_overflowed(source, &item));",
        ";",
        "a reader reports a sound store as damaged",
    ),
]
MUTANTS = [mutant._replace(parts=("formats",)) for mutant in NOTICED]


def formats(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for name in ("memory", "file"):

        def each(test: Callable[..., None], *arguments: object, name: str = name) -> None:
            place = directory / name
            place.mkdir()
            test(*arguments, Medium(name, place))
            shutil.rmtree(place)

        for golden in ("compacted", "log", "overflow"):
            each(test_upgrade.test_only_a_commit_or_a_recovery_upgrades, f"format0/{name}-{golden}")
            each(test_upgrade.test_an_upgrade_changes_nothing_else, f"format0/{name}-{golden}")
        each(test_upgrade.test_a_feature_that_a_reader_must_know)
        each(test_upgrade.test_a_feature_that_a_writer_must_know)
        each(test_upgrade.test_features_that_nobody_must_know_are_kept)
        each(test_upgrade.test_a_later_format_is_refused)
        for first in (0, 4096):
            place = directory / name
            place.mkdir()
            test_upgrade.test_a_damaged_copy_of_format_0_is_reported_and_replaced(Medium(name, place), first)
            shutil.rmtree(place)
