"""paper/, on tiny sizes and made figures: what is kept, what kills leave, and that all of it is reported."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = (ROOT / "benchmarks", ROOT / "paper")

pytestmark = [
    pytest.mark.skipif(not all(place.is_dir() for place in PLACES), reason="the experiment isn't here"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
    pytest.mark.long,
    pytest.mark.no_sanitizer,
]

X = np.random.default_rng(0).random((80, 6))


@pytest.fixture(scope="module", autouse=True)
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Their modules can be imported, and compile into a directory of the tests' own."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(PLACES[0]), str(ROOT)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PMSTORE_DOMAIN", "memory")  # as _common does, for good
        import _common

        _common.BUILD = tmp_path_factory.mktemp("build")
        yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(tuple(map(str, PLACES))):
            del sys.modules[name]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield {"memory": Path(directory), "disk": tmp_path}


def test_strategies_restore_what_they_saved(places: dict[str, Path]) -> None:
    from paper import kills, loops, strategies

    first, second = (kills.state_of("KMeans, 10 × 784", iteration) for iteration in (0, 1))
    for state in first, second:
        state[loops.DERIVED[0]] = state["centers"][:2] ** 2
    for number, kind in enumerate((*strategies.CHECKPOINTS, *strategies.WITH_DERIVED)):
        for medium, parent in places.items():
            directory = parent / str(number)
            directory.mkdir()
            strategy = kind(directory, medium, first)
            strategy.place(strategy.of(second))
            strategy.save(strategy.of(second))
            strategy.settle()
            strategy.close()
            found = kind.load(directory)
            assert found.keys() == {"centers", "progress", *(loops.DERIVED if kind.derived else ())}, kind.name
            assert all(np.array_equal(found[name], second[name]) for name in found), kind.name


def test_loops_are_scikit_learns(places: dict[str, Path]) -> None:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    from paper import loops

    *_, (_, state) = loops.kmeans(X, 3, 4)
    start = X[np.random.default_rng(0).choice(len(X), 3, replace=False)]
    fitted = KMeans(3, init=start, n_init=1, max_iter=4, tol=0).fit(X)
    assert np.allclose(state["centers"] + X.mean(axis=0), fitted.cluster_centers_, rtol=1e-12)
    *_, (_, state) = loops.mixture(X, 3, 4)
    options = {"init_params": "random_from_data", "reg_covar": loops.REGULARIZATION, "random_state": 0}
    with pytest.warns(ConvergenceWarning):
        fitted = GaussianMixture(3, max_iter=4, tol=0, **options).fit(X)
    assert np.array_equal(state["covariances"], fitted.covariances_) and state["progress"][1] == 4


@pytest.mark.parametrize(("moment", "verdict", "returned"), [(0.0, "the one before", False), (1e4, "this one", True)])
def test_a_kill_before_a_checkpoint_and_one_after_it(
    moment: float, verdict: str, returned: bool, tmp_path: Path
) -> None:
    from paper import kills, strategies

    for kind in strategies.Renamed, strategies.Pmstore:
        directory = tmp_path / kind.name
        directory.mkdir()
        assert kills.kill(kind, directory, "disk", "KMeans, 10 × 784", moment) == (verdict, returned)


def test_what_a_kill_leaves_is_told_apart() -> None:
    from paper import kills

    model = "GaussianMixture, 10 × 128"
    old, new = kills.state_of(model, 6), kills.state_of(model, 7)
    assert kills.verdict(new, model, 7) == "this one"
    assert kills.verdict(old, model, 7) == "the one before"
    assert kills.verdict(old, model, 9) == "iteration 6"
    assert kills.verdict({**new, "progress": old["progress"]}, model, 7) == "a mixture"
    torn = {**new, "covariances": new["covariances"].copy()}
    torn["covariances"][9, 127, 127] = old["covariances"][9, 127, 127]
    assert kills.verdict(torn, model, 7) == "a mixture"
    assert kills.verdict({"progress": new["progress"]}, model, 7) == "a mixture"


def measured(places: dict[str, Path]) -> dict[str, Any]:
    """Results of all three parts, from tiny fits."""
    from paper import checkpoints, estimators, kills, loops, strategies

    known = {"quick": True, "machine": "a machine", "priority": "normal priority", "versions": {"scikit-learn": "1"}}
    fits = []
    for model, loop in loops.LOOPS.items():
        one = checkpoints.fit(loop, X, 3, 2, places, 1, 1e-9, 1e-9)
        fits.append({"data": "made", "model": model, **one})
    model = estimators.models()[0]["KMeans"]
    parameters = model.parameters(2, 3)
    stored = {"model": "KMeans", "clusters": 2, **estimators.fits(model, X, parameters, places)}
    resumed = estimators.resumes(model, X, parameters, places["memory"], 1)
    kinds = (strategies.Savez, strategies.Pmstore)
    cells = [
        {"who": kind.name, "medium": "disk", "model": "KMeans, 10 × 784", "inside": {kills.PREVIOUS: 2}, "after": {}}
        for kind in kinds
    ]
    described = [{"name": "made", "what": "made: random", "shape": [80, 6]}]
    return {
        "paper-checkpoints": {**known, "file systems": {"disk": "ext4"}, "data": described, "fits": fits},
        "paper-estimators": {**known, "fits": [stored], "resumes": [{"model": "KMeans", "clusters": 2, **resumed}]},
        "paper-kills": {**known, "cells": cells},
    }


def test_what_is_measured_is_reported(places: dict[str, Path]) -> None:
    from report import sections

    from paper import checkpoints
    from paper import report as paper

    raw = measured(places)
    for fit in raw["paper-checkpoints"]["fits"]:
        for one in fit["checkpoints"]:  # a machine may be so busy that a first checkpoint takes that long
            slow = one["times"][0] >= checkpoints.SLOW
            assert len(one["back to back"]) == (0 if slow else checkpoints.LEAST), one["who"]
    for one in raw["paper-estimators"]["fits"][0]["stored"]:
        assert one["same"] and len(one["commits"]) >= 4
        assert len(one["baselines"]) == (len(one["commits"]) if one["medium"] == "disk" else 0)
    known = sections(raw, paper.PAPER)
    assert known.keys() == paper.PAPER.sections.keys()
    assert "| made | 80 × 6 | made: random |" in known["paper-data"]
    assert "| pmstore, in place | KMeans, 10 × 784 | 2 |  | 2 |  |  |" in known["paper-kills"]
    for who in (
        "np.savez_compressed",
        "PyMM, in place",
        "np.savez, all attributes",
        "pmstore, in place, with the copy",
    ):
        assert f"| {who}" in known["paper-costs"]
    assert (
        "disk | kills after which pmstore has a whole state, at most one iteration old | all | 2 of 2 | yes |"
        in (known["paper-targets"])
    )


def made_fit(medium: str, baseline: float) -> dict[str, Any]:
    commits = [0.9, 0.002, 0.004, 0.003, 0.002, 0.004, 0.985]
    baselines = [baseline] * 7 if medium == "disk" else []
    return {"medium": medium, "fit": 300.0, "commits": commits, "baselines": baselines, "same": True}


def test_targets_compare_medians_and_name_what_is_missing() -> None:
    from paper import targets

    def checkpoint(who: str, medium: str, times: list[float]) -> dict[str, Any]:
        pairs = [[0.0, seconds / 10] for seconds in times]
        return {"who": who, "medium": medium, "bytes": 1, "placing": [0.001] * 3, "times": times, "back to back": pairs}

    loop = {
        "data": "made",
        "model": "GaussianMixture",
        "clusters": 10,
        "iterations": [1.0, 1.0, 9.0],
        "checkpoints": [
            checkpoint("np.savez", "memory", [0.02, 0.03, 9.0]),
            checkpoint("pmstore, in place", "memory", [0.001, 0.002, 9.0]),
        ],
    }
    raw = {
        "paper-checkpoints": {"data": [{"name": "made"}], "fits": [loop]},
        "paper-estimators": {
            "fits": [
                {
                    "model": "KMeans",
                    "clusters": k,
                    "plain": 290.0,
                    "stored": [made_fit("memory", 0), made_fit("disk", f)],
                }
                for k, f in ((2, 0.003), (3, 0.002))
            ]
        },
    }
    lines = {(t.medium, t.what): (t.measured, t.met) for t in targets.targets(raw)}
    assert lines["tmpfs", "KMeans, k = 2, 3: commits in a fit, the largest share"] == ("0.63%", True)
    assert lines["disk", "KMeans, k = 2, 3: commit ÷ baseline in the same fit, the worst"] == ("1.5", True)
    rest = "KMeans, k = 2, 3: the fit without commits ÷ scikit-learn's (2% are noise)"
    assert lines["disk", rest] == ("1.03", False)
    of = "GaussianMixture, k = 10: "
    assert lines["tmpfs", of + "np.savez ÷ pmstore, both on tmpfs"] == ("15", True)
    assert lines["tmpfs", of + "the same, the copy into the store included"] == (None, False)  # of the last comparison
    assert lines["disk", of + "savez, fsync, rename ÷ pmstore, both on the disk"] == (None, False)
    assert lines["tmpfs", "GaussianMixture: commits in a fit, the largest share"] == (None, False)


def test_every_marked_place_of_the_page_has_a_section() -> None:
    from paper import report as paper

    known = {*paper.PAPER.sections, *(f"picture-{name}" for name in paper.PAPER.pictures)}
    for document in paper.PAPER.documents:
        text = document.read_text(encoding="utf-8")
        marked = re.findall(r"<!-- bench:([\w-]+) -->\n.*?<!-- /bench:\1 -->", text, flags=re.DOTALL)
        assert len(marked) == text.count("<!-- bench:") == text.count("<!-- /bench:")
        assert set(marked) == known


def test_data_are_what_they_are_called(tmp_path: Path) -> None:
    from argparse import Namespace

    from paper import data

    images = np.arange(5 * 4, dtype=np.uint8).reshape(5, 4)
    np.savez(tmp_path / "some.npz", x=images)
    real = data.mnist(Namespace(mnist=tmp_path / "some.npz", openml=False), 3)
    assert "real" in real.what and "some.npz" in real.what and np.array_equal(real.X, images[:3] / 255)
    stand_in, music, digits = data.load(Namespace(mnist=None, openml=False), 30, 20)
    for one in stand_in, music:
        assert one.name.startswith("synthetic, ") and one.what.startswith("synthetic: ")
    assert [one.X.shape for one in (stand_in, music, digits)] == [(30, 784), (20, data.BANDS), (1797, 64)]
    assert all(one.X.dtype == float and np.isfinite(one.X).all() for one in (stand_in, music, digits))
