"""examples/: the demo tells the truth, reads what it says it reads, and fails when it must; the others run."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import random
import re
import runpy
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest

from tests.support.template import WITH_ESTIMATORS, python, template

pytest.importorskip("sklearn")
pytest.importorskip("rich")
threadpool_limits = pytest.importorskip("threadpoolctl").threadpool_limits

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
IMAGES = np.arange(5 * 3 * 3, dtype=np.uint8).reshape(5, 3, 3)


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))  # where Python looks first when it runs the script: mnist.py is there
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))


def run(*arguments: str | Path, script: str = "demo.py", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.mark.long
@pytest.mark.slow
def test_five_kills_and_the_same_result(tmp_path: Path) -> None:
    done = run("--dir", tmp_path, "--n-init", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "n_init = 100 runs" in text
    assert text.count("SIGKILL") == 5 and "5 kills. Every result was identical." in text
    assert "loads the result" in text and "without a commit" in text
    assert not list(tmp_path.iterdir()), "the demo left something"


@pytest.mark.long
def test_too_few_kills_are_a_failure(tmp_path: Path) -> None:
    done = run("--dir", tmp_path, "--n-init", "10", "--kills", "1")
    assert done.returncode == 1 and "kills struck" in done.stdout


@pytest.mark.parametrize("late", [0, 2])
def test_kills_come_before_the_last_runs(late: int, demo: ModuleType) -> None:
    """This holds if a child runs on before it is killed, too. Kills that missed made this file fail by chance."""
    for seed in range(200):
        lives: list[Any] = []
        fate = demo.Fate(kills=5, runs=100, seconds=1.0, dice=random.Random(seed))
        while (moment := fate.moment(lives)) is not None:
            assert 0 <= moment.delay <= 0.01
            begun = lives[-1].last["run"] if lives else 0
            lives.append(demo.Life(last={"run": max(moment.run, begun) + late, "iteration": 0}, killed=True))
        assert len(lives) == 5 and lives[-1].last["run"] < 95


def test_a_difference_is_found(demo: ModuleType) -> None:
    fit = SimpleNamespace(cluster_centers_=np.ones((2, 3)), labels_=np.zeros(4, np.int32), inertia_=1.0, n_iter_=3)
    assert demo.differences(fit, fit) == []
    for name, value in {
        "cluster_centers_": np.nextafter(np.ones((2, 3)), 2),
        "labels_": np.zeros(4, np.int64),
        "inertia_": np.nextafter(1.0, 2),
        "n_iter_": 4,
    }.items():
        assert demo.differences(fit, SimpleNamespace(**{**vars(fit), name: value})) == [name]


@pytest.mark.parametrize(("seconds_per_run", "runs"), [(1e-9, 999), (0.01, 400), (3.0, 100)])
def test_the_runs_are_in_the_hundreds(
    seconds_per_run: float, runs: int, demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def fit(clusters: int, n_init: int, random_state: int) -> Any:
        def advance(_: Any) -> None:
            nonlocal clock
            clock += n_init * seconds_per_run

        return SimpleNamespace(fit=advance)

    monkeypatch.setattr(demo, "SklearnKMeans", fit)
    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=lambda: clock))
    assert demo.enough_runs(IMAGES, demo.parse([])) == runs


def idx(images: Any) -> bytes:
    return struct.pack(f">HBB{images.ndim}I", 0, 8, images.ndim, *images.shape) + images.tobytes()


@pytest.mark.parametrize("name", ["x.npz", "data.npz", "images-idx3-ubyte", "images-idx3-ubyte.gz"])
def test_mnist_is_read_from_files(name: str, demo: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".npz":
        np.savez(path, **{path.stem: IMAGES, "y": np.zeros(5)})
    else:
        path.write_bytes(gzip.compress(idx(IMAGES)) if path.suffix == ".gz" else idx(IMAGES))
    images, what = demo.load_images(demo.parse(["--mnist", str(path)]))
    assert images.dtype == float and (images == IMAGES.reshape(5, 9)).all()
    assert str(path) in what and "5 images" in what


@pytest.mark.parametrize("contents", [b"", b"nonsense", idx(IMAGES)[:20], idx(np.zeros(7, np.uint8)), b"\x1f\x8bno"])
@pytest.mark.parametrize("name", ["bad.npz", "bad.gz"])
def test_other_files_are_refused(name: str, contents: bytes, demo: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(demo.NoImages, match="no images"):
        demo.read_mnist(path)


def test_a_file_that_is_missing_gives_one_line(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--mnist", str(tmp_path / "none.npz")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("demo: ") and len(said.splitlines()) == 1
    assert demo.main(["--n-init", "1", "--dir", str(tmp_path / "none")]) == 2
    assert "no directory" in capsys.readouterr().err


def test_openml_out_of_reach(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr(sys.modules["mnist"], "fetch_openml", unreachable)
    with pytest.raises(demo.NoImages, match=r"can't be reached .*no network.* --mnist FILE"):
        demo.load_images(demo.parse(["--openml"]))


def test_rich_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('No module named rich', name='rich')\n")
    code = f"""import sys, runpy
for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:  # of the template
    del sys.modules[name]
sys.path.insert(0, {str(tmp_path)!r})
runpy.run_path({str(EXAMPLES / "demo.py")!r})"""
    done = template(WITH_ESTIMATORS).run("-c", code)
    assert done.returncode == 1 and done.stderr.startswith("demo: rich is missing. Install it")


def test_bad_arguments(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--kills", "0"], ["--n-init", "0"], ["--mnist", "x", "--openml"]):
        with pytest.raises(SystemExit) as caught:
            demo.parse(arguments)
        assert caught.value.code == 2
    capsys.readouterr()
    assert isinstance(demo.parse([]), argparse.Namespace)


def test_quickstart(tmp_path: Path) -> None:
    for times in ("1 times", "2 times"):
        done = python(EXAMPLES / "quickstart.py", directory=tmp_path)
        assert done.returncode == 0 and times in done.stdout, done.stderr


@pytest.mark.long
def test_archive_fit(tmp_path: Path) -> None:
    pytest.importorskip("numcodecs")
    done = run("folder", script="archive_fit.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "25 versions, the newest says 'round 24'" in done.stdout and "the same bits as" in done.stdout
    assert (tmp_path / "folder" / "centres.png").stat().st_size > 5000 and not (tmp_path / "run.pm").exists()


@pytest.mark.long
def test_finetune_history(tmp_path: Path) -> None:
    pytest.importorskip("numcodecs")
    done = run("folder", script="finetune_history.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = r"(\w+): 100 versions in the space of ([0-9.]+).*\n  accuracy ([0-9.]+) % → ([0-9.]+) %"
    found = re.findall(line, done.stdout)
    sizes = {name: float(size) for name, size, _, _ in found}
    begins, ends = zip(*[(float(begin), float(end)) for _, _, begin, end in found])
    assert sizes["zstd"] > 5 * sizes["LCDelta"] > 5
    assert begins[0] == begins[1] < 50, "the first version is lossless, and knows half of the digits"
    assert min(ends) > 90 and abs(ends[0] - ends[1]) < 2
    assert (tmp_path / "folder" / "finetune.png").stat().st_size > 5000


@pytest.mark.long
def test_kmeans_digits(tmp_path: Path) -> None:
    first, again = (run(script="kmeans_digits.py", cwd=tmp_path) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "after 0 runs" in first.stdout and "loading" in again.stderr
    assert first.stdout.split()[:2] == again.stdout.split()[:2]


@pytest.mark.slow
def test_nmf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program is killed after its seventh commit, and run again; once more, where nobody disturbs it."""
    script = str(EXAMPLES / "nmf.py")
    killed = f"""
import itertools, os, runpy, signal
from pmstore._core import Core
from threadpoolctl import threadpool_limits
commit, commits = Core.commit, itertools.count(1)
Core.commit = lambda core: (commit(core), next(commits) == 7 and os.kill(os.getpid(), signal.SIGKILL))
with threadpool_limits(1):
    runpy.run_path({script!r}, run_name="__main__")
"""
    for place in ("disturbed", "alone"):
        (tmp_path / place).mkdir()
    done = template(WITH_ESTIMATORS).run("-c", killed, directory=tmp_path / "disturbed")
    assert done.returncode == -signal.SIGKILL
    said = []
    for place in ("disturbed", "alone", "disturbed"):
        monkeypatch.chdir(tmp_path / place)
        with threadpool_limits(1):
            runpy.run_path(script, run_name="__main__")
        said.append(capsys.readouterr().out.splitlines())
    assert [int(lines[0].split()[-1]) for lines in said] == [6, 0, int(said[1][0].split()[0])]
    assert said[0][1] == said[1][1] == said[2][1]
