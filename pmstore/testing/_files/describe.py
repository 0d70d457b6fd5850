"""A crash state in words: the events before it, the losses, and the sync that would have prevented them."""

from __future__ import annotations

from pmstore._display import count_text
from pmstore.testing._files.explore import Found, Tally
from pmstore.testing._files.model import Model
from pmstore.testing._files.recording import ROOT, Event

__all__ = ["describe_event", "describe_failure", "describe_tally", "missing_syncs"]

_REMEDY = "Write what belongs together into one new file, fsync it, and rename it over the old one"


def describe_event(event: Event) -> str:
    """One event, such as "write of run.npz, bytes 0–4095"."""
    if event.kind == "said":
        return f"the program's output {_said(event.data)!r}"
    if event.kind == "write":
        name = "store to a mapping of" if event.call == "store" else f"{event.call} to"
        return f"{name} {event.path}, {_bytes(event.offset, event.offset + event.length)}"
    if event.kind == "size":
        return f"{event.call} of {event.path} to {count_text(event.length, 'byte')}"
    if event.kind in ("rename", "exchange"):
        return f"{event.kind} of {event.path} to {event.name2}"
    if event.kind == "create":
        what = {
            "mkdir": "the directory ",
            "mkdirat": "the directory ",
            "symlink": "the link ",
            "symlinkat": "the link ",
        }
        return f"creation of {what.get(event.call, '')}{event.path}"
    return f"{event.call} of {event.path or 'the directory'}"


def describe_failure(model: Model, found: Found) -> str:
    """Several lines: the crash, its losses, the check's complaint, the missing sync."""
    state = found.state
    events = model.recording.events
    lines = [f"{found.text}", f"  crash: {_moment(model, state.point)}"]
    if state.lost:
        lines += [f"  lost: {line}" for line in _losses(model, state.point, state.lost)]
        last = state.point - 1
        if last > max(model.pieces[n].event for n in state.lost) and events[last].kind not in ("sync", "close", "said"):
            lines.append(f"  kept, though later: {describe_event(events[last])}")
    else:
        lines.append("  lost: nothing: the files are as the program had left them at that moment, as after a kill")
    lines += [f"  {line}" for line in missing_syncs(model, found)]
    return "\n".join(lines)


def _moment(model: Model, point: int) -> str:
    events = model.recording.events
    if point == 0:
        return "before anything had happened"
    text = f"after event {point} of {len(events)}, {describe_event(events[point - 1])}"
    said = [event for event in events[:point] if event.kind == "said" and event.data.strip()]
    if said and events[point - 1].kind != "said":
        text += f"; the program had said {_said(said[-1].data)!r}"
    return text


def _losses(model: Model, point: int, lost: frozenset[int]) -> list[str]:
    """The losses in each file's contents, and each lost change of names."""
    lines = []
    gone = _never_made(model, lost)
    contents = [n for n in sorted(lost) if model.pieces[n].kind != "entry" and model.pieces[n].inode not in gone]
    for inode in dict.fromkeys(model.pieces[n].inode for n in contents):
        mine = [n for n in contents if model.pieces[n].inode == inode]
        numbers = dict.fromkeys(model.pieces[n].event for n in mine)
        parts = [
            f"the {model.recording.events[number].call} to {count_text(model.recording.events[number].length, 'byte')}"
            for number in numbers
            if model.recording.events[number].kind == "size"
        ]
        parts += _ranges(model, [n for n in mine if model.pieces[n].kind == "data"])
        writes = [number for number in numbers if model.recording.events[number].kind == "write"]
        sizes = [n for number in writes for n in model.by_event[number] if model.pieces[n].kind == "size"]
        if any(n in lost for n in sizes):
            kept = [model.pieces[n].place for n in sizes if n not in lost]
            parts.append("its growth" + (f" beyond {count_text(max(kept), 'byte')}" if kept else ""))
        elif sizes:
            parts.append("but not its growth (zeros are read there)")
        lines.append(f"of {_name(model, inode, point)}: {', '.join(parts)}")
    entries = [n for n in sorted(lost) if model.pieces[n].kind == "entry"]
    return lines + [describe_event(model.recording.events[model.pieces[n].event]) for n in entries]


def _never_made(model: Model, lost: frozenset[int]) -> set[int]:
    """Files whose creation was lost: the losses in their contents do not matter."""
    made = (model.recording.events[model.pieces[n].event] for n in lost if model.pieces[n].kind == "entry")
    return {event.inode for event in made if event.kind == "create"}


def _ranges(model: Model, pieces: list[int]) -> list[str]:
    """The bytes of data pieces, joined into ranges."""
    spans = []
    for n in pieces:
        piece, event = model.pieces[n], model.recording.events[model.pieces[n].event]
        begin, end = piece.place * model.sector, (piece.place + 1) * model.sector
        spans.append((max(event.offset, begin), min(event.offset + event.length, end)))
    runs: list[list[int]] = []
    for begin, end in sorted(spans):
        if runs and begin <= runs[-1][1]:
            runs[-1][1] = max(end, runs[-1][1])
        else:
            runs.append([begin, end])
    shown = [_bytes(*run) for run in runs[:4]]
    return [*shown, f"and {len(runs) - 4} more places"] if len(runs) > 4 else shown


def missing_syncs(model: Model, found: Found) -> list[str]:
    """Changes of the program that would make this state impossible."""
    state = found.state
    if not state.lost:
        return [f"no sync would help: a program that is killed at this moment leaves this. {_REMEDY}"]
    event = model.recording.events[state.point - 1]
    earlier = [n for n in sorted(state.lost) if model.pieces[n].event < state.point - 1]
    if not earlier:
        return [f"no sync would help: a crash in the midst of this call is enough. {_REMEDY}"]
    before = {
        "said": f"before the program says {_said(event.data)!r}",
        "rename": f"before {event.path} is renamed to {event.name2}",
        "unlink": f"before {event.path} is removed",
        "write": f"before {event.path} is written at {event.offset}",
    }.get(event.kind, f"before the {describe_event(event)}")
    needed: dict[str, None] = {}
    gone = _never_made(model, state.lost)
    for n in earlier:
        piece = model.pieces[n]
        if piece.kind != "entry" and piece.inode in gone:
            continue
        if piece.kind == "entry":
            lost = model.recording.events[piece.event]
            folder = lost.folder2 or lost.folder
            needed[f"fsync of {_folder(model, folder, state.point - 1)}"] = None
        else:
            needed[f"fsync of {_name(model, piece.inode, state.point - 1)}"] = None
    return [f"missing: {sync} {before}" for sync in needed]


def _folder(model: Model, number: int, point: int) -> str:
    return "the directory" if number == ROOT else f"the directory {_name(model, number, point)}"


def _name(model: Model, inode: int, point: int) -> str:
    """The name of a file at a point."""
    name = ""
    for number, event in enumerate(model.recording.events):
        if number >= point and name:
            break
        if event.inode == inode and event.path:
            renamed = event.kind in ("rename", "exchange") and number < point
            folder = event.path.rpartition("/")[0]
            name = (f"{folder}/{event.name2}" if folder else event.name2) if renamed else event.path
    return name or _path(model, inode, ROOT, "") or f"inode {inode}"


def _path(model: Model, inode: int, folder: int, path: str) -> str:
    """The path of an inode before the run, from a directory downward; empty if it did not exist."""
    for name, number in model.recording.inodes[folder].entries.items():
        full = f"{path}/{name}" if path else name
        if number == inode:
            return full
        if model.recording.inodes[number].kind == "directory":
            found = _path(model, inode, number, full)
            if found:
                return found
    return ""


def _bytes(begin: int, end: int) -> str:
    return f"bytes {begin}–{end - 1}" if end - begin > 1 else f"byte {begin}"


def _said(data: bytes) -> str:
    lines = data.decode("utf-8", "replace").strip().splitlines()
    text = lines[-1] if lines else ""
    return text if len(text) <= 60 else text[:57] + "…"


def describe_tally(tally: Tally) -> str:
    """One sentence about the number of states that were evaluated."""
    possible = f"{round(10**tally.possible)}" if tally.possible < 6 else f"about 10^{tally.possible:.0f}"
    evaluated = count_text(tally.evaluated, "distinct crash state")
    where = f"at {count_text(tally.points, 'point')}"
    if tally.exhaustive:
        return f"{evaluated} tried {where}: all that the model allows ({possible} before equal ones are counted as one)"
    return f"{evaluated} tried, a sample of at most {possible} that the model allows {where}"
