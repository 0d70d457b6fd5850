"""Stores of each format, written by the pmstore of their time: they open, read as they did, and can be written.

docs/format.md describes the bytes. `layout.py` reads them without pmstore, and `make.py` wrote the files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import pmstore
from pmstore import _cli
from tests.conftest import Medium
from tests.golden import contents, layout
from tests.golden.files import FORMATS, GOLDEN, KNOWN, bytes_of, check_contents, registered, unpacked
from tests.golden.make import HERE, NAMES, ONE_THREAD, estimators
from tests.support.template import MODULES, ROOT, WITH_ESTIMATORS, template

every_file = pytest.mark.parametrize("golden", GOLDEN)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)


def test_every_file_is_as_it_was_released() -> None:
    assert sorted(KNOWN) == sorted(GOLDEN)
    for golden in GOLDEN:
        data = bytes_of(golden)
        assert hashlib.sha256(data).hexdigest() == KNOWN[golden]["sha256"], golden
    found = {str(path.relative_to(HERE)).removesuffix(".pm.gz") for path in HERE.glob("*/*.gz")}
    assert found == set(GOLDEN)


@every_file
def test_it_opens_and_reads_as_it_did(golden: str, medium: Medium) -> None:
    path = unpacked(golden, medium.directory)
    before = path.read_bytes()
    with pmstore.open(path, "r", media=medium.name) as store:  # type: ignore[arg-type]
        assert store.sequence == KNOWN[golden]["sequence"]
        check_contents(store, golden)
        assert store.check().ok
    assert path.read_bytes() == before, "a reader changed the file"
    with pmstore.open(path, "r+", media=medium.name, verify=True) as store:  # type: ignore[arg-type]
        assert store.sequence == KNOWN[golden]["sequence"]
        check_contents(store, golden)
        assert store.check().ok


@every_file
def test_it_is_written_and_read_again(golden: str, medium: Medium) -> None:
    path = unpacked(golden, medium.directory)
    with pmstore.open(path, "r+", media=medium.name) as store:  # type: ignore[arg-type]
        store["new"] = np.arange(3000.0)
        store["new value"] = {"a": 1}
    for mode in ("r", "r+"):
        with pmstore.open(path, mode, media=medium.name, verify=True) as store:  # type: ignore[arg-type]
            assert store.sequence == KNOWN[golden]["sequence"] + 1
            assert np.array_equal(store["new"], np.arange(3000.0)) and store["new value"] == {"a": 1}
            if mode == "r+":
                del store["new"], store["new value"]
                check_contents(store, golden)


@every_file
def test_the_commands_read_it(golden: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = unpacked(golden, tmp_path)
    with pmstore.open(path, "r") as store:
        names = len(store)
    for command in ("info", "ls", "ls --long", "ls --tree", "ls --json", "dump", "dump --json", "check"):
        assert _cli.main([*command.split(), str(path)]) == 0, command
        assert capsys.readouterr().out, command
    assert _cli.main(["info", "--json", str(path)]) == 0
    about = json.loads(capsys.readouterr().out)
    kinds = ("arrays", "values", "lists", "objects", "derived_arrays")
    assert about["names"] == names == sum(about[kind] for kind in kinds)


ENVIRONMENT = ("numpy", "BLAS", "machine", "OpenMP threads", "BLAS threads", "scikit-learn", "scipy")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("golden", [golden for golden in GOLDEN if golden.endswith("fits")])
def test_an_interrupted_fit_goes_on(golden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    from pmstore._resume.fit import Fit

    whole_fingerprint = Fit._whole_fingerprint
    with pmstore.open(unpacked(golden, tmp_path), "r+") as store:
        for fit, reference in zip(estimators(store, "stopped"), estimators(store, "whole"), strict=True):
            for estimator in (reference, fit):
                stored = store[f"{estimator.name}/fingerprint"]  # other libraries would be another fit
                here = {key: stored[key] for key in ENVIRONMENT if key in stored}
                monkeypatch.setattr(Fit, "_whole_fingerprint", lambda self, here=here: whole_fingerprint(self) | here)
                before = store.sequence
                estimator.fit(contents.samples())
                commits = store.sequence - before
                assert commits == 0 if estimator is reference else 0 < commits < fit.n_iter_
            assert fit.n_iter_ == reference.n_iter_ and store[f"{fit.name}/finished"]
            for name in ("cluster_centers_", "means_", "weights_"):
                if hasattr(reference, name):
                    assert np.allclose(getattr(fit, name), getattr(reference, name), rtol=1e-9)
        assert store.check().ok


# ---- the layout, read without pmstore


@every_file
def test_the_page_about_the_format_tells_how_to_read_it(golden: str, tmp_path: Path) -> None:
    found = layout.Store(unpacked(golden, tmp_path).read_bytes())
    assert found.header.version == int(golden[len("format")])
    assert found.sequence == KNOWN[golden]["sequence"]
    kinds = [[item.kind for item in record.items] for record in found.records]
    assert kinds == KNOWN[golden]["items"]


def written(medium: Medium, name: str) -> Path:
    arguments = ("--one", medium.name, name, medium.directory)
    # One thread of OpenMP: its threads do not survive a fork.
    process = template(WITH_ESTIMATORS, **ONE_THREAD) if name == "fits" else template(MODULES)
    made = process.run("-m", "tests.golden.make", *arguments, directory=ROOT)
    assert made.returncode == 0, made.stderr
    return medium.directory / f"{medium.name}-{name}.pm"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_today_has_the_documented_layout(name: str, medium: Medium) -> None:
    found = layout.Store(written(medium, name).read_bytes())
    golden = KNOWN[f"format{FORMATS[-1]}/{medium.name}-{name}"]
    kinds = {item.kind for record in found.records for item in record.items}
    assert found.header.version == FORMATS[-1]
    if name == "fits":
        return  # other libraries may need another number of iterations
    assert found.sequence == golden["sequence"]
    assert kinds == {kind for record in golden["items"] for kind in record}
    assert sorted({(entry.kind, key[:1]) for key, entry in found.entries.items()}) == sorted(
        {(kind, key.encode()) for kind, key in golden["entries"]}
    )
