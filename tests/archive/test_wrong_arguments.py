"""Arguments of a wrong type: errors name the argument, and the right kind of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pmstore
from pmstore import archive, codecs
from pmstore.archive import _archive
from tests.archive.stepping import drained

pytest.importorskip("numcodecs")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda store, at: archive.export("arch", "x.npz"),
            r"takes a version, not 'arch': archive.open\(url\)\[version\]",
        ),
        (lambda store, at: archive.export(at, "x.npz"), r"takes a version, not an archive: archive\[archive.latest\]"),
        (lambda store, at: store.drain(5), "an archive is a path, a URL, or a list of these, not 5"),
        (lambda store, at: archive.open(5), "an archive is a path, a URL, or a list of these, not 5"),  # type: ignore
        (lambda store, at: store.drain("b", keep="x"), "keep: last is a number of versions, not 'x'"),
        (lambda store, at: store.drain("b", keep={"age": "x"}), "keep: age is a number of seconds, not 'x'"),
        (lambda store, at: store.drain("b", every="a"), "every is a number of commits, not 'a'"),
        (lambda store, at: store.drain("b", every=1.5), "every is a number of commits, not 1.5"),
        (lambda store, at: at.forget(1), r"takes a list of versions, such as \[1\], not 1"),
        (lambda store, at: codecs.LCDelta(bits="a"), "bits is an int, not 'a'"),  # type: ignore
        (lambda store, at: codecs.LCDelta(rebase_every=None), "rebase_every is an int, not None"),  # type: ignore
    ],
)
def test_errors_name_the_argument(
    call: Callable[[pmstore.Store, archive.Archive], Any], message: str, tmp_path: Path
) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        store["x"] = 1
        store.commit()
        drained(store, tmp_path / "a")
        with pytest.raises(TypeError, match=message):
            call(store, archive.open(tmp_path / "a"))


def test_a_timeout_that_no_float_holds(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm") as store, store.drain(tmp_path / "a") as drain:
        for call in (drain.wait, drain.capture, drain.close):
            with pytest.raises(ValueError, match="timeout is 0 or more seconds that fit into a float"):
                call(timeout=10**400)


def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    with pmstore.open(tmp_path / "s.pm") as store:
        drained(store, tmp_path / "a")
    with pytest.raises(KeyError) as caught:
        archive.open(tmp_path / "a").untag("nope")
    assert str(caught.value) == f"no tag 'nope' in the archive {tmp_path / 'a'}"


def test_options_come_as_keywords_or_in_a_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def refused(url: Any, options: Any) -> Any:
        given.append(options)
        raise pmstore.ArchiveError("enough")

    monkeypatch.setattr(_archive, "places_of", refused)
    for options in ({"key": 1, "secret": 2}, {"storage_options": {"key": 1, "secret": 2}}):
        for call in (
            lambda options=options: archive.open("s3://x", **options),
            lambda options=options: archive.restore(tmp_path / "x.pm", sources=["s3://x"], **options),
        ):
            with pytest.raises(pmstore.ArchiveError, match="enough"):
                call()
    assert given == [{"key": 1, "secret": 2}] * 4
