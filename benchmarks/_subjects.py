"""pmstore with the interface of a competitor, used as programs use it; libpmemobj, which a C program uses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from _common import CSRC, HERE, MEDIA, Array, compiled, library
from _competitors import PMEMOBJ, Competitor, Guarantee, sync_path

import pmstore

PMSTORE = Guarantee("transactions", "no", "the last commit", "the last commit")


class Missing(Exception):
    """A library or program that is to be measured is missing; the text says what to install."""


class Pmstore(Competitor):
    """store.commit(), after the array was changed. Rows: in a transaction, the writes included."""

    name, guarantee, partial = "pmstore", PMSTORE, True
    rows = False
    domain = "memory"

    def create(self) -> pmstore.Store:
        os.environ["PMSTORE_DOMAIN"] = self.domain
        return pmstore.open(self.path, "w", media=MEDIA[self.medium])

    def start(self) -> None:
        self.store = self.create()
        live = self.store.create_array("array", self.array.shape, "f8")
        live[...] = self.array
        self.store.commit()
        self.array: Array = live  # what is measured changes it in place

    def put(self) -> None:
        self.store.commit()

    def drain(self) -> None:
        self.store.stats()  # waits until the committed image is up to date
        sync_path(self.path)

    def close(self) -> None:
        self.store.close()

    def read(self) -> Array:
        with pmstore.open(self.path, "r") as store:
            return np.array(store["array"])


class PmstoreWith(Pmstore):
    """The same through a with statement. The change is made before it, and belongs to it."""

    name, rows = "pmstore, with", True

    def put(self) -> None:
        with self.store.transaction():
            pass

    def put_rows(self, rows: Array, values: Array) -> None:
        if len(rows) == 1:
            with self.store.transaction():
                self.array[rows[0]] = values[0]
        else:
            with self.store.transaction():
                self.array[rows] = values


class PmstoreOnly(PmstoreWith):
    """Rows, as a declared write set: nothing else changes."""

    name, whole = "pmstore, with only=", False

    def start(self) -> None:
        super().start()
        self.transaction: Any = self.store.transaction
        try:
            self.transaction(only=[self.array[:1]])
        except TypeError as error:
            self.close()
            raise Missing(f"this version of pmstore has no transaction(only=…): {error}") from error

    def put_rows(self, rows: Array, values: Array) -> None:
        array = self.array
        if len(rows) == 1:
            row = array[rows[0]]
            with self.transaction(only=[row]):
                row[...] = values[0]
        else:
            with self.transaction(only=[array[row] for row in rows.tolist()]):
                array[rows] = values


class PmstoreWithBackToBack(PmstoreWith):
    """The same without a pause between two transactions: the second may wait for the write-back of the first."""

    name, back_to_back = "pmstore, with, back to back", True


class PmstoreOnlyBackToBack(PmstoreOnly):
    name, back_to_back = "pmstore, with only=, back to back", True


class PmstoreInProcess(Pmstore):
    """The same on tmpfs as it is: a commit survives a kill, and nothing is flushed."""

    name, domain, media = "pmstore, domain process", "process", ("memory",)


class PmstoreWithInProcess(PmstoreWith):
    name, domain, media = "pmstore, with, domain process", "process", ("memory",)


class PmstoreOnlyInProcess(PmstoreOnly):
    name, domain, media = "pmstore, with only=, domain process", "process", ("memory",)


PMSTORES: list[type[Pmstore]] = [
    *(Pmstore, PmstoreWith, PmstoreOnly),
    *(PmstoreWithBackToBack, PmstoreOnlyBackToBack),
    *(PmstoreInProcess, PmstoreWithInProcess, PmstoreOnlyInProcess),
]


# ---- libpmemobj

NO_FLUSH = "libpmemobj, tx_add_range, no flush"
PMEMOBJ_WAYS = {"libpmemobj, tx_add_range": "tx", "libpmemobj, reserve and publish": "publish", NO_FLUSH: "tx"}
PMEMOBJ_GUARANTEES = {name: PMSTORE if way == "publish" else PMEMOBJ for name, way in PMEMOBJ_WAYS.items()}


def pmemobj_program() -> Path:
    """The compiled C program that uses libpmemobj. Raises Missing, which says what to install."""
    if not any((Path(folder) / "libpmemobj.h").exists() for folder in ("/usr/include", "/usr/local/include")):
        raise Missing(
            "no libpmemobj.h. Install it: apt-get install libpmemobj-dev (Fedora: dnf install libpmemobj-devel)"
        )
    sources = [HERE / "pmemobj.c", HERE / "baseline.c", CSRC / "base" / "hash.c"]
    try:
        return compiled("pmemobj", sources, "-lpmemobj")
    except subprocess.CalledProcessError as error:
        raise Missing(f"pmemobj.c doesn't compile: {error.stderr.strip()}") from error


def pmemobj_cell(
    directory: Path, medium: str, who: str, size: int, rows: int, changed: int, *, seconds: float, least: int, most: int
) -> dict[str, Any]:
    """times, baselines and verified, of an array of `size` bytes, or of `changed` of `rows` rows of `size` bytes."""
    numbers = [str(size), str(rows), str(changed), PMEMOBJ_WAYS[who], str(seconds), str(least), str(most)]
    # On tmpfs it would call msync for each range, which does nothing there; on a disk that is what it needs.
    # NO_FLUSH: as with eADR, so that it does what a kill needs, and no more.
    force = {"PMEM_IS_PMEM_FORCE": "1" if medium == "memory" else "0", "PMEM_NO_FLUSH": str(int(who == NO_FLUSH))}
    environment = {**os.environ, **force}
    done = subprocess.run(
        [str(pmemobj_program()), str(directory), medium, *numbers],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"the driver stopped: {(done.stderr or str(done.returncode)).strip()}")
    return dict(json.loads(done.stdout))


__all__ = [
    "NO_FLUSH",
    "PMEMOBJ_GUARANTEES",
    "PMEMOBJ_WAYS",
    "PMSTORES",
    "Missing",
    "library",
    "pmemobj_cell",
    "pmemobj_program",
]
