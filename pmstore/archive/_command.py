"""The command line of archives: ``pmstore archive list|verify|restore|export|diff|tag|forget|drain``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from pmstore._display import aligned, count_text, lines_text, name_text, size_text, status_text
from pmstore._errors import ArchiveDamagedError
from pmstore._interchange.formats import FORMATS
from pmstore._store.entrance import open as open_store
from pmstore._values.as_json import print_json, to_json
from pmstore.archive import _archive
from pmstore.archive._archive import Archive, Info
from pmstore.archive._export import export
from pmstore.archive._format import lossy_text

__all__ = ["add_parser"]

_SOUND, _DAMAGED, _FAILED = 0, 1, 2
_TURN = 0.25  # seconds between two looks whether a store is still written

_EXIT_STATUS = """\
exit status:
  0  it worked; for verify: the archive is sound
  1  the archive is damaged
  2  the archive can't be opened or written, a version is not in it, or the arguments are wrong
"""


def add_parser(commands: Any) -> None:
    """Adds ``archive`` and its commands to the subparsers of ``pmstore``."""
    parser = commands.add_parser(
        "archive",
        help="the versions of a store that was drained: list, verify, restore, export, diff, tag, forget, drain",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_archive = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Callable[[argparse.Namespace], int],
        text: str,
        example: str,
        *,
        worked: str = "it worked",
        failed: str = "the archive can't be opened, a version is not in it",
    ) -> Any:
        sub = of_archive.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  pmstore archive {example}\n\n{status_text(worked, 'the archive is damaged', failed)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("path", metavar="URL", help="a folder, or a URL of fsspec such as s3://bucket/run")
        sub.set_defaults(command=_without_extra(command), parser=sub)
        return sub

    unopened = "the archive can't be opened"
    listing = add("list", list_, "the versions, oldest first", "list runs/archive", failed=unopened)
    listing.add_argument("-n", type=_number, default=None, metavar="N", help="only the newest N")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument("--losses", action="store_true", help="also the error of each array that is approximated")
    sound = "the archive is sound"
    verifying = add(
        "verify", verify, "read and check every object", "verify runs/archive", worked=sound, failed=unopened
    )
    verifying.add_argument("--json", action="store_true", help="print JSON")
    restoring = add("restore", restore, "make a store of a version", "restore runs/archive again.pm --version 120")
    restoring.add_argument("destination", metavar="DST", help="the new store, which must not exist")
    restoring.add_argument("--version", type=_number, default=None, help="the newest unless given")
    restoring.add_argument("--source", action="append", default=[], metavar="URL", help="another place, asked later")
    restoring.add_argument("--fork", action="store_true", help="a store that goes on with an archive of its own")
    comparing = add("diff", diff, "the names that differ between two versions", "diff runs/archive 100 120")
    comparing.add_argument("old", type=_number, metavar="OLD", help="a version")
    comparing.add_argument("new", type=_number, metavar="NEW", help="a version")
    comparing.add_argument("--json", action="store_true", help="print JSON")
    tagging = add("tag", tag, "name a version, so that it stays; or list the tags", "tag runs/archive best")
    tagging.add_argument("name", metavar="NAME", nargs="?", help="letters, digits and ._-")
    tagging.add_argument("--version", type=_number, default=None, help="the newest unless given")
    tagging.add_argument("--delete", action="store_true", help="take the tag NAME away")
    forgetting = add("forget", forget, "remove versions", "forget runs/archive --keep-last 10 --keep-every 100")
    forgetting.add_argument("versions", type=_number, metavar="VERSION", nargs="*", default=[])
    forgetting.add_argument("--keep-last", type=_number, default=None, metavar="N", help="remove all but the newest N")
    forgetting.add_argument("--keep-every", type=_number, default=None, metavar="N", help="and every N-th")
    exporting = add("export", export_, "write a version in another format", "export runs/archive run.npz --version 120")
    exporting.add_argument("destination", metavar="DST", help="the new file or, for zarr, the new directory")
    exporting.add_argument("--version", type=_number, default=None, help="the newest unless given")
    exporting.add_argument("--format", choices=FORMATS, help="by default, what the name of DST ends in")
    draining = add(
        "drain",
        drain,
        "archive a store's commits until it is closed",
        "drain runs/archive run.pm",
        failed="STORE can't be opened, the archive can't be written",
    )
    draining.add_argument("store", metavar="STORE", help="the store's file; another process may write it")
    draining.add_argument(
        "--every", type=_number, default=1, metavar="N", help="at least N commits between two versions"
    )
    draining.add_argument(
        "--codec",
        type=_codec,
        action="append",
        default=[],
        metavar="[PATTERN=]NAME[:KEY=VALUE,…]",
        help="how arrays are compressed, by patterns of their names: zstd, lcdelta:bits=3, a codec of numcodecs",
    )


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number is wanted, not {text!r}")
    return int(text)


def _codec(text: str) -> tuple[str, dict[str, Any]]:
    """A pattern of names, and the configuration of the codec for them."""
    head, _, rest = text.partition(":")
    pattern, _, name = head.rpartition("=")
    config: dict[str, Any] = {"id": f"pmstore.{name}" if name in ("lcdelta", "planes") else name}
    for setting in filter(None, rest.split(",")):
        key, found, value = setting.partition("=")
        if not found:
            raise argparse.ArgumentTypeError(f"a setting of a codec is KEY=VALUE, not {setting!r}")
        config[key] = int(value) if value.lstrip("-").isdecimal() else value
    return pattern or "*", config


def _without_extra(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def run(chosen: argparse.Namespace) -> int:
        try:
            return command(chosen)
        except ArchiveDamagedError as error:
            return _complain(chosen.path, error, _DAMAGED)
        except (ImportError, KeyError) as error:
            return _complain(chosen.path, error, _FAILED)

    return run


def _complain(path: str, error: Exception | str, status: int) -> int:
    print(f"pmstore: {lines_text(f'{path}: {error}')}", file=sys.stderr)
    return status


def list_(chosen: argparse.Namespace) -> int:
    """Prints the versions."""
    archive = _archive.open(chosen.path)
    rows = archive.log()
    rows = rows[max(0, len(rows) - chosen.n) :] if chosen.n is not None else rows
    if chosen.json:
        print_json([_in_json(archive, row, chosen.losses) for row in rows])
        return _SOUND
    for row, line in zip(rows, aligned(map(_columns, rows))):
        print(line)
        if chosen.losses and row.lossy:
            for name, loss in archive[row.version].losses.items():
                print(f"    {name_text(name)}  relative error {loss.relative:.3g}, absolute {loss.absolute:.3g}")
    return _SOUND


def _in_json(archive: Archive, row: Info, losses: bool) -> dict[str, Any]:
    found = {**row._asdict(), "loss": None if row.loss is None else row.loss._asdict()}
    if losses:
        found["losses"] = {name: loss._asdict() for name, loss in archive[row.version].losses.items()}
    return {key: to_json(value) for key, value in found.items()}


def _columns(row: Info) -> tuple[str, ...]:
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.time))
    except (OverflowError, ValueError, OSError):  # of a clock that was wrong
        when = f"{row.time:g} s"
    said = [name_text(row.message)] if row.message else []
    said += [f"{name_text(name)}={value!r:.40}" for name, value in row.attributes.items()]
    said += [f"[{tag}]" for tag in row.tags]
    said += [lossy_text(row.lossy, row.loss)] if row.loss is not None else []
    return str(row.version), when, row.kind, size_text(row.size), " ".join(said)


def verify(chosen: argparse.Namespace) -> int:
    """Reads and checks every object."""
    report = _archive.open(chosen.path).verify()
    if chosen.json:
        problems = [one._asdict() for one in report]
        print_json({"ok": report.ok, "versions": report.versions, "lossy": report.lossy, "problems": problems})
    else:
        print(report)
    return _SOUND if report.ok else _DAMAGED


def restore(chosen: argparse.Namespace) -> int:
    """Makes a store of a version."""
    archive = _archive.open([chosen.path, *chosen.source])
    if chosen.fork:
        if chosen.version is None:
            chosen.version = archive.latest
        archive.fork(chosen.version, chosen.destination)
        version = chosen.version
    else:
        version = archive.restore(chosen.destination, chosen.version)
    print(f"{name_text(chosen.destination)}: version {version}")
    return _SOUND


def diff(chosen: argparse.Namespace) -> int:
    """Prints the names that differ between two versions."""
    found = _archive.open(chosen.path).diff(chosen.old, chosen.new)
    count = {name: None if one.elements is None else len(one.elements) for name, one in found.items()}
    if chosen.json:
        print_json({name: {"kind": one.kind, "elements": count[name]} for name, one in found.items()})
        return _SOUND
    rows = (
        (name_text(name), one.kind, "" if count[name] is None else count_text(count[name] or 0, "element"))
        for name, one in found.items()
    )
    for line in aligned(rows):
        print(line)
    return _SOUND


def tag(chosen: argparse.Namespace) -> int:
    """Names a version, takes a tag away, or lists the tags."""
    if chosen.delete and chosen.name is None:
        return _complain(chosen.path, "--delete takes the NAME of a tag", _FAILED)
    archive = _archive.open(chosen.path)
    if chosen.name is None:
        for line in aligned((name, str(version)) for name, version in sorted(archive.tags.items())):
            print(line)
    elif chosen.delete:
        try:
            archive.untag(chosen.name)
        except KeyError:
            return _complain(chosen.path, f"there is no tag {chosen.name!r}", _FAILED)
    else:
        archive.tag(chosen.name, chosen.version)
    return _SOUND


def forget(chosen: argparse.Namespace) -> int:
    """Removes versions."""
    keep = {"last": chosen.keep_last, "every": chosen.keep_every}
    named = {name: number for name, number in keep.items() if number is not None}
    archive: Archive = _archive.open(chosen.path)
    gone = archive.forget(chosen.versions, keep=named or None)
    print(f"removed {count_text(len(gone), 'version')}; {count_text(len(archive), 'version')} left")
    return _SOUND


def export_(chosen: argparse.Namespace) -> int:
    """Writes a version in another format."""
    archive = _archive.open(chosen.path)
    version = archive.latest if chosen.version is None else chosen.version
    names = export(archive[version], chosen.destination, chosen.format)
    print(f"{name_text(chosen.destination)}: version {version}, {count_text(names, 'name')}")
    return _SOUND


def drain(chosen: argparse.Namespace) -> int:
    """Archives a store's commits until the process that writes it has closed it, an interrupt, or an error that ends
    the drain."""
    with open_store(chosen.store, "r") as store:
        rules = sorted(chosen.codec, key=lambda rule: rule[0] == "*")  # the first one that matches counts
        codec = {pattern: "zstd" if config == {"id": "zstd"} else config for pattern, config in rules}
        try:
            following = store.drain(chosen.path, every=chosen.every, codec=codec or "zstd")
        except (TypeError, ValueError) as error:
            return _complain(chosen.path, error, _FAILED)
        with contextlib.suppress(KeyboardInterrupt):
            while store.written and not following.progress().ended:
                time.sleep(_TURN)
        following.close()
        progress = following.progress()
        version = following.wait(progress.captured if progress.error is None else None)  # raises the error
    print(f"{name_text(chosen.path)}: version {version}")
    return _SOUND
