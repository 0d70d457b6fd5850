"""The command line: ``python -m pmstore info|ls|check|dump|export|import|backup|compact|upgrade|salvage|watch|top|
doctor PATH``, also installed as ``pmstore``.

All but ``compact``, ``upgrade`` and ``import`` open a store for reading only, and never change it. ``crash`` is in
``testing/_command.py``, ``archive`` in ``archive/_command.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pmstore
from pmstore._display import (
    Row,
    aligned,
    columns,
    count_text,
    lines_text,
    name_text,
    notes_of,
    size_text,
    status_text,
    tree_lines,
)
from pmstore._store.opening import path_of
from pmstore._store.reading import consistently
from pmstore._values.as_json import print_json, to_json

Command = Callable[[argparse.Namespace], int]

SOUND, DAMAGED, FAILED = 0, 1, 2
FORMATS = ("zarr", "npz", "safetensors", "hdf5")  # those of _interchange/formats.py, which other commands do not load

EXIT_STATUS = """\
exit status:
  0  it worked; for check: the store is sound
  1  the store is damaged; for dump: something in what is to be printed is, or can't be decoded here, and was not
     printed; for salvage: something was left out
  2  the store can't be opened, a name is not in it, or the arguments are wrong
"""


class Failure(Exception):
    """An error that the user sees in one line, with exit status 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. By default, the arguments are those of the process."""
    before, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        return _main(arguments)
    finally:
        warnings.formatwarning = before


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as the command shows it, without a line of its sources."""
    return f"pmstore: {lines_text(str(message))}\n"


def _main(arguments: Sequence[str] | None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the process has begun without it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        chosen, unknown = _parser(words).parse_known_args(words)
        names = [word for word in unknown if hasattr(chosen, "names") and not word.startswith("-")]
        if names != unknown:
            chosen.parser.error(f"unrecognized arguments: {' '.join(word for word in unknown if word not in names)}")
        getattr(chosen, "names", []).extend(names)  # argparse takes none behind options
        status: int = chosen.command(chosen)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except pmstore.StoreNotFoundError as error:
        path = getattr(chosen, "store", chosen.path)  # of `archive drain`, whose first path is the archive
        text = str(error)
        if not os.path.exists(path):
            text = "it is a link to a file that is not there" if os.path.islink(path) else "there is no such file"
        return _complain(f"{path}: {text}", FAILED)
    except pmstore.NotAStoreError as error:  # it is a CorruptStoreError too
        return _complain(f"{chosen.path}: {error}", FAILED)
    except pmstore.CorruptStoreError as error:
        return _complain(f"{chosen.path}: damaged: {error}", DAMAGED)
    except (pmstore.Error, Failure, MemoryError) as error:
        return _complain(f"{chosen.path}: {str(error) or 'no memory'}", FAILED)
    except OSError as error:
        where = error.filename or "standard output"  # all other calls name a file
        return _complain(f"{where}: {error.strerror or error}", FAILED)
    except ValueError as error:  # an impossible path
        return _complain(str(error), FAILED)


def _complain(text: str, status: int) -> int:
    with contextlib.suppress(OSError):  # nobody can be told, and the status tells
        print(f"pmstore: {lines_text(text)}", file=sys.stderr)
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words. The commands of ``crash`` and ``archive`` are added only if they are called, because
    they load the crash explorer and the archive."""
    parser = argparse.ArgumentParser(
        prog="pmstore",
        description="Looks into a store of pmstore, copies it, makes its file smaller, or rescues what is sound in a "
        "damaged one; and finds crashes that a program fails in.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pmstore {pmstore.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Command,
        text: str,
        examples: str,
        path: str = "the store's file",
        *,
        worked: str = "it worked",
        damaged: str = "the store is damaged",
        failed: str = "the store can't be opened",
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"examples:\n{examples}\n{status_text(worked, damaged, failed)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("path", metavar="PATH", help=path)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(command=command, parser=sub)
        return sub

    add("info", info, "format, medium, commits, and how full the store is", "  pmstore info run.pm\n")

    ls = add(
        "ls",
        ls_,
        "the names in the store",
        "  pmstore ls -l run.pm\n  pmstore ls --tree run.pm model\n",
        failed="the store can't be opened, a group is not in it",
    )
    ls.add_argument("names", metavar="GROUP", nargs="*", default=[], help="only what is in these groups")
    ls.add_argument("-l", "--long", action="store_true", help="with shapes, dtypes and sizes")
    ls.add_argument("-t", "--tree", action="store_true", help="as a tree")

    add(
        "check",
        check,
        "verify every structure and every checksum",
        "  pmstore check run.pm && echo sound\n",
        worked="the store is sound",
    )

    dump = add(
        "dump",
        dump_,
        "print values",
        "  pmstore dump run.pm epoch model/centers\n"
        "  pmstore dump --json run.pm\n"
        "  pmstore dump --npy centers.npy run.pm model/centers\n",
        damaged="the store is damaged; or something in what is to be printed is, or can't be decoded here, and was\n"
        "     not printed",
        failed="the store can't be opened, a name is not in it, FILE can't be written",
    )
    dump.add_argument("names", metavar="NAME", nargs="*", default=[], help="what to print; everything unless given")
    dump.add_argument(
        "--npy", metavar="FILE", help="write the one array that is named to FILE, which must not exist, for numpy.load"
    )

    exporting = add(
        "export",
        export_,
        "write what is in the store as HDF5, zarr, .npz or safetensors, also while it is written",
        "  pmstore export run.pm run.h5\n  pmstore export run.pm run.zarr --group model\n",
        failed="the store can't be opened, a name is not in it, DST can't be written",
    )
    exporting.add_argument("destination", metavar="DST", help="the new file or, for zarr, the new directory")
    exporting.add_argument("--format", choices=FORMATS, help="by default, what the name of DST ends in")
    exporting.add_argument("--group", default="", help="only what is in this group")
    exporting.add_argument("--name", action="append", help="only this name or group; may be given several times")

    importing = add(
        "import",
        import_,
        "read a file of HDF5, zarr, .npz or safetensors into a store, in one commit",
        "  pmstore import run.h5 run.pm\n  pmstore import run.npz run.pm --group model --name arr_0=weights\n",
        "the file or, for zarr, the directory",
        failed="PATH can't be read, a name is not in it, STORE can't be written",
    )
    importing.add_argument("destination", metavar="STORE", help="the store, which is made if there is none")
    importing.add_argument("--format", choices=FORMATS, help="by default, what the name of PATH ends in")
    importing.add_argument("--group", default="", help="where the names go")
    importing.add_argument(
        "--name", action="append", metavar="NAME[=NEW]", help="only this name or group; may be given several times"
    )

    backing_up = add(
        "backup",
        backup,
        "copy one commit of the store to a new store, also while it is written",
        "  pmstore backup run.pm /mnt/disk/run-monday.pm\n",
        failed="the store can't be opened, DST can't be written",
    )
    backing_up.add_argument("destination", metavar="DST", help="the new store, which must not exist")

    add("compact", compact, "make the file as small as its contents", "  pmstore compact run.pm\n")

    add("upgrade", upgrade, "give the file the newest version of its format", "  pmstore upgrade run.pm\n")

    salvaging = add(
        "salvage",
        salvage,
        "copy all that is sound in a damaged store to a new store",
        "  pmstore salvage damaged.pm rescued.pm\n",
        worked="everything was copied",
        damaged="something was left out",
        failed="nothing could be copied",
    )
    salvaging.add_argument("destination", metavar="DST", help="the new store, which must not exist")

    watch = add(
        "watch",
        watch_,
        "show how the fits in a store go on, while another process writes it",
        "  pmstore watch run.pm\n  pmstore watch run.pm digits\n  pmstore watch --web run.pm\n"
        "  pmstore watch --json run.pm | while read line; do …\n",
        failed="the store can't be opened, a name is not in it",
    )
    watch.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        default=[],
        help="fits, values, lists, arrays and groups; by default all but arrays",
    )
    watch.add_argument("--once", action="store_true", help="show the present state, and end")
    watch.add_argument("--web", action="store_true", help="serve a page for a browser on this machine")
    watch.add_argument("--port", type=_port, default=0, help="the port of the page; a free one unless given")

    top = add(
        "top",
        top_,
        "list the stores in a directory, and whether a process writes each",
        "  pmstore top runs/\n",
        "the directory",
        damaged="",
        failed="the directory can't be read",
    )
    top.add_argument("--once", action="store_true", help="show the present state, and end")

    add(
        "doctor",
        doctor,
        "what this machine and a directory offer to stores, for bug reports",
        "  pmstore doctor .\n  pmstore doctor --json /dev/shm\n",
        "the directory",
        damaged="",
        failed="the directory can't be used",
    )

    if words[:1] == ["crash"]:
        from pmstore.testing._command import add_parser

        add_parser(commands, words)
    else:
        commands.add_parser("crash", help="find the crashes that a program does not survive: run, replay, open")
    if words[:1] == ["archive"]:
        from pmstore.archive._command import add_parser as add_archive

        add_archive(commands)
    else:
        commands.add_parser("archive", help="the versions of a store: list, verify, restore, export, …")
    return parser


# ---- watch, top


def watch_(chosen: argparse.Namespace) -> int:
    """Shows how the fits in a store go on, until it is interrupted."""
    from pmstore._watch.command import watch

    if chosen.web and (chosen.json or chosen.once):
        raise Failure("--web serves a page: it goes with --port and names only")
    try:
        watch(chosen.path, chosen.names, once=chosen.once, as_json=chosen.json, web=chosen.web, port=chosen.port)
    except ImportError as error:
        raise Failure(str(error)) from error
    return SOUND


def top_(chosen: argparse.Namespace) -> int:
    """Shows the stores in a directory, until it is interrupted."""
    from pmstore._watch.command import top

    try:
        top(chosen.path, once=chosen.once, as_json=chosen.json)
    except ImportError as error:
        raise Failure(str(error)) from error
    return SOUND


def doctor(chosen: argparse.Namespace) -> int:
    """Prints the facilities of this machine and of a directory."""
    from pmstore._doctor import examine, lines

    found = examine(chosen.path)
    if chosen.json:
        print_json(found)
    else:
        print("\n".join(lines(found)))
    return FAILED if found["directory"]["error"] else SOUND


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to {(1 << 16) - 1}, not {text!r}")
    return int(text)


# ---- info


_NOUNS = {"array": "array", "value": "value", "list": "list", "object": "object", "derived": "derived array"}


def _count_key(kind: str) -> str:
    return _NOUNS[kind].replace(" ", "_") + "s"


def info(chosen: argparse.Namespace) -> int:
    """Prints the kind of store, the number of its names, and the use of its file."""
    with pmstore.open(chosen.path, "r") as store:
        stats = store.stats()
        about: dict[str, Any] = {
            "path": os.fspath(store.path),
            "format_version": _format_version(store.path),
            "media": store.media,
            "sequence": store.sequence,
            "names": len(store),
            **{_count_key(kind): 0 for kind in _NOUNS},
            "attributed": len(notes_of(store)),
            "contents_bytes": 0,
            "file_bytes": stats.file_size,
            "region_bytes": stats.region_size,
            "region_used_bytes": stats.region_used,
            "log_bytes": stats.log_size,
            "log_used_bytes": stats.log_used,
            "records_replayed": stats.records_replayed,
            "written": store.written,
        }
        for row in store._rows():
            about[_count_key(row[1])] += 1
            about["contents_bytes"] += row[4]
    if chosen.json:
        print_json(about)
        return SOUND
    print(name_text(str(about["path"])))
    replayed = about["records_replayed"]
    state = "being written" if about["written"] else "clean"
    if replayed:
        state = f"not closed: {count_text(replayed, 'commit')} to recover from the log"
    for label, text in {
        "format": str(about["format_version"]),
        "medium": about["media"],
        "commits": f"{about['sequence']:,}",
        "names": ", ".join(
            count_text(about[_count_key(kind)], noun)
            for kind, noun in _NOUNS.items()
            if about[_count_key(kind)] or kind in ("array", "value", "list")
        ),
        **({"attributes": f"of {count_text(about['attributed'], 'name')}"} if about["attributed"] else {}),
        "contents": size_text(about["contents_bytes"]),
        "file": size_text(about["file_bytes"]),
        "region": _fill(about["region_used_bytes"], about["region_bytes"]),
        "log": _fill(about["log_used_bytes"], about["log_bytes"]),
        "state": state,
    }.items():
        print(f"  {label:<12}{text}" if about["attributed"] else f"  {label:<10}{text}")
    return SOUND


def _fill(used: int, size: int) -> str:
    return f"{size_text(used)} of {size_text(size)} used ({100 * used / max(size, 1):.0f}%)"


def _format_version(path: str) -> int:
    """The version in the file's header, from the first of its two copies that can be read and begins correctly."""
    with Path(path).open("rb") as file:
        try:
            head = os.pread(file.fileno(), 12, 0)
        except OSError:
            head = b""
        if not head.startswith(b"PMSTORE"):
            head = os.pread(file.fileno(), 12, 4096)
    return int.from_bytes(head[8:12], "little")


# ---- ls


def ls_(chosen: argparse.Namespace) -> int:
    """Prints the names in the store or in one of its groups."""
    with pmstore.open(chosen.path, "r") as store:
        groups = [group.strip("/") for group in chosen.names or [""]]
        for group in groups:
            if group and group not in store:
                raise Failure(f"no name and no group {group!r} in it")
        found = itertools.chain.from_iterable(_rows_below(store, group) for group in groups)
        rows: Iterator[Row] = found if len(groups) == 1 else iter({row[0]: row for row in found}.values())
        notes = notes_of(store) if chosen.long else {}
        if chosen.json:
            print_json([_row_json(row, store) for row in rows])
        elif chosen.tree:
            _print_table(
                (line.guide + line.label, *columns(line.row if chosen.long else None, notes.get(line.path, "")))
                for line in tree_lines(rows)
            )
        elif chosen.long:
            _print_table((name_text(row[0]), *columns(row, notes.get(row[0], ""))) for row in rows)
        else:
            for row in rows:
                print(name_text(row[0]))
    return SOUND


def _rows_below(store: pmstore.Store, group: str) -> Iterator[Row]:
    """Rows of a group, or of the one name if it is no group, with their full names."""
    if not group:
        yield from store._rows()
        return
    yield from (row for row in store._rows() if row[0] == group)
    for name, *about in store.group(group)._rows():
        yield (f"{group}/{name}", *about)


def _row_json(row: Row, store: pmstore.Store) -> dict[str, Any]:
    name, kind, shape, dtype, nbytes, type_name, _ = row
    about: dict[str, Any] = {"name": name, "kind": kind, "type": type_name, "nbytes": nbytes}
    if dtype is not None:
        about |= {"shape": list(shape or ()), "dtype": str(dtype)}
    with contextlib.suppress(pmstore.CorruptStoreError, pmstore.StoreIOError, pmstore.StaleSnapshotError):
        if attributes := store.attrs(name).items():
            about["attributes"] = {key: to_json(value) for key, value in attributes}
    return about


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    for line in aligned(rows):
        print(line)


# ---- check


def check(chosen: argparse.Namespace) -> int:
    """Verifies the whole store and prints each problem: the file, or a snapshot while it is written."""
    try:
        store = pmstore.open(chosen.path, "r", exclusive=True)
    except pmstore.StoreLockedError:
        store = pmstore.open(chosen.path, "r")
    with store:
        problems = [str(problem) for problem in consistently(store.check, store.refresh)]
        names = 0 if problems else len(store)
    if chosen.json:
        print_json({"path": chosen.path, "sound": not problems, "problems": problems})
    elif problems:
        for problem in problems:
            print(problem)
        print(f"{name_text(chosen.path)}: {count_text(len(problems), 'problem')}", file=sys.stderr)
    else:
        print(f"{name_text(chosen.path)}: sound, {count_text(names, 'name')}")
    return DAMAGED if problems else SOUND


# ---- backup, compact, upgrade and salvage


@contextlib.contextmanager
def _progress(chosen: argparse.Namespace) -> Iterator[Callable[[int, int], object] | None]:
    """A line on a terminal that tells how much is copied; it is gone at the end."""
    if chosen.json or not sys.stderr.isatty():
        yield None
        return

    def tell(done: int, total: int) -> None:
        text = f"{name_text(chosen.path)}: {size_text(done)} of {size_text(total)}"
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def backup(chosen: argparse.Namespace) -> int:
    """Copies a commit, and prints which."""
    with pmstore.open(chosen.path, "r") as store, _progress(chosen) as progress:
        sequence = store.backup(chosen.destination, progress=progress)
    size = os.stat(path_of(chosen.destination)).st_size
    if chosen.json:
        print_json({"path": chosen.path, "destination": chosen.destination, "sequence": sequence, "bytes": size})
    else:
        print(f"{name_text(chosen.destination)}: commit {sequence} of {name_text(chosen.path)}, {size_text(size)}")
    return SOUND


def compact(chosen: argparse.Namespace) -> int:
    """Makes the file smaller, and prints its sizes before and after."""
    with _progress(chosen) as progress:
        gained = pmstore.compact(chosen.path, progress=progress)
    after = os.stat(path_of(chosen.path)).st_size
    if chosen.json:
        print_json({"path": chosen.path, "bytes_before": after + gained, "bytes_after": after})
    elif gained:
        print(f"{name_text(chosen.path)}: {size_text(after + gained)} before, {size_text(after)} now")
    else:
        print(f"{name_text(chosen.path)}: {size_text(after)}, and can't be smaller")
    return SOUND


def upgrade(chosen: argparse.Namespace) -> int:
    """Gives the file the newest version of its format, and prints the version that it had."""
    before, after = pmstore.upgrade(chosen.path), _format_version(path_of(chosen.path))
    if chosen.json:
        print_json({"path": chosen.path, "version_before": before, "version_after": after})
    else:
        text = "already" if before == after else f"now, {before} before"
        print(f"{name_text(chosen.path)}: format {after} {text}")
    return SOUND


def salvage(chosen: argparse.Namespace) -> int:
    """Copies the sound parts, and prints the names that were left out and why."""
    try:
        report = pmstore.salvage(chosen.path, chosen.destination)
    except pmstore.CorruptStoreError as error:
        raise Failure(f"nothing can be salvaged: {error}") from error
    with pmstore.open(chosen.destination, "r") as store:
        names = len(store)
    if chosen.json:
        problems = [{"name": problem.name, "problem": str(problem)} for problem in report]
        print_json({"path": chosen.path, "destination": chosen.destination, "names": names, "problems": problems})
    else:
        for problem in report:
            print(problem)
        print(
            f"{name_text(chosen.destination)}: {count_text(names, 'name')}, "
            f"{count_text(len(report), 'problem')} in {name_text(chosen.path)}"
        )
    return SOUND if report.ok else DAMAGED


# ---- export, import and dump


def export_(chosen: argparse.Namespace) -> int:
    """Writes the names of one commit in another format."""
    from pmstore._interchange.command import export_

    return export_(chosen, Failure)


def import_(chosen: argparse.Namespace) -> int:
    """Reads a file of another format into a store."""
    from pmstore._interchange.command import import_

    return import_(chosen, Failure)


def dump_(chosen: argparse.Namespace) -> int:
    """Prints values, or writes one array to an .npy file."""
    from pmstore._dump import dump

    return SOUND if dump(chosen, Failure, lambda text: _complain(text, DAMAGED)) else DAMAGED
