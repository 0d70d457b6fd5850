"""The recorder of file operations, over real child processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pmstore
from pmstore.testing._base.errors import CrashTestError
from pmstore.testing._files.model import Model
from pmstore.testing._files.record import record
from pmstore.testing._files.recording import Recording, load, save

Recorded = Callable[..., Recording]


@pytest.fixture
def files(tmp_path: Path, tracing: None) -> Iterator[Path]:
    directory = tmp_path / "files"
    directory.mkdir()
    yield directory


@pytest.fixture
def python(files: Path) -> Recorded:
    """python(code): a recording of a Python program in which `d` is the directory."""

    def run(code: str, **options: bool) -> Recording:
        program = f"import os, sys\nd = {str(files)!r}\n" + textwrap.dedent(code)
        return record([sys.executable, "-S", "-c", program], files, **options)

    return run


def kinds(recording: Recording) -> list[str]:
    return [event.kind if event.kind != "sync" else f"sync {event.how}" for event in recording.events]


def final(recording: Recording) -> dict[str, bytes]:
    """The files at the end, as the recording explains them."""
    model = Model(recording)
    return {name: file.content for name, file in model.image(model.points - 1).items() if file.kind == "file"}


def test_every_way_to_write(python: Recorded, files: Path) -> None:
    recording = python("""
        f = os.open(d + "/f", os.O_RDWR | os.O_CREAT)
        os.write(f, b"abcdef")
        os.pwrite(f, b"X", 1)
        os.writev(f, [b"gh", b"ij"])
        os.pwritev(f, [b"Y", b"Z"], 2)
        os.pwritev(f, [b"!"], 4, os.RWF_DSYNC)
        a = os.open(d + "/f", os.O_WRONLY | os.O_APPEND)
        os.write(a, b"end")
        os.pwrite(a, b"still the end", 0)
        g = os.open(d + "/g", os.O_WRONLY | os.O_CREAT)
        os.copy_file_range(f, g, 4, 0)
        os.copy_file_range(f, g, 2, 1, 10)
        os.sendfile(g, f, 0, 3)
        r, w = os.pipe()
        os.write(w, b"piped")
        os.splice(r, g, 5, offset_dst=20)
        """)
    assert final(recording) == {name: (files / name).read_bytes() for name in ("f", "g")}
    assert kinds(recording).count("write") == 11
    assert kinds(recording).count("sync range") == 1


def test_sizes(python: Recorded, files: Path) -> None:
    recording = python("""
        f = os.open(d + "/f", os.O_RDWR | os.O_CREAT)
        os.write(f, b"x" * 1000)
        os.ftruncate(f, 10)
        os.truncate(d + "/f", 20)
        os.posix_fallocate(f, 0, 5000)
        os.close(os.open(d + "/f", os.O_WRONLY | os.O_TRUNC))
        """)
    sizes = [event.length for event in recording.events if event.kind == "size"]
    assert sizes == [10, 20, 5000, 0]
    assert final(recording) == {"f": b""}


def test_names(python: Recorded, files: Path) -> None:
    (files / "old").write_bytes(b"old")
    recording = python("""
        os.mkdir(d + "/sub")
        open(d + "/sub/a", "w").write("a")
        os.link(d + "/sub/a", d + "/b")
        os.symlink("b", d + "/l")
        os.replace(d + "/b", d + "/old")
        os.chdir(d + "/sub")
        os.rename("a", "../c")
        os.rename(d + "/sub", d + "/sub2")
        fd = os.open(d, os.O_RDONLY)
        os.mkdir("e", dir_fd=fd)
        os.rmdir("e", dir_fd=fd)
        open(d + "/l", "a").write("through the link?")
        os.unlink(d + "/c")
        os.fsync(fd)
        """)
    image = Model(recording).image(len(recording.events))
    assert {name: file.kind for name, file in image.items()} == {
        "b": "file",
        "l": "link",
        "old": "file",
        "sub2": "directory",
    }
    assert final(recording) == {"b": b"through the link?", "old": b"a"}
    assert kinds(recording)[-1] == "sync file"


def test_exchange_and_unnamed_files(python: Recorded, files: Path) -> None:
    recording = python("""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for name in "ab":
            open(d + "/" + name, "w").write(name)
        if libc.renameat2(-100, (d + "/a").encode(), -100, (d + "/b").encode(), 2):
            raise OSError(ctypes.get_errno(), "renameat2")
        f = os.open(d, os.O_RDWR | os.O_TMPFILE)
        os.write(f, b"unnamed")
        if libc.linkat(-100, f"/proc/self/fd/{f}".encode(), -100, (d + "/c").encode(), 0x400):
            raise OSError(ctypes.get_errno(), "linkat")
        """)
    assert final(recording) == {"a": b"b", "b": b"a", "c": b"unnamed"}


def test_an_unnamed_file_that_is_opened_once_more(python: Recorded, files: Path) -> None:
    """Found when stores began to write past the page cache: it was taken for a new file, called '#123 (deleted)'."""
    recording = python("""
        import ctypes
        f = os.open(d, os.O_RDWR | os.O_TMPFILE)
        again = os.open(f"/proc/self/fd/{f}", os.O_RDWR | os.O_DSYNC)
        os.write(again, b"by the other")
        assert not ctypes.CDLL(None).linkat(-100, f"/proc/self/fd/{f}".encode(), -100, (d + "/a").encode(), 0x400)
        """)
    assert final(recording) == {"a": b"by the other"}
    assert kinds(recording) == ["write", "sync range", "link"]


def test_asynchronous_writes_are_refused_as_by_an_old_kernel(python: Recorded, files: Path) -> None:
    recording = python("""
        import ctypes, errno, platform
        libc, context = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong()
        setup = {"x86_64": 206, "aarch64": 0}[platform.machine()]
        assert libc.syscall(setup, 8, ctypes.byref(context)) == -1 and ctypes.get_errno() == errno.ENOSYS
        """)
    assert not recording.events


def test_a_store_whose_records_leave_in_parts(files: Path) -> None:
    """It has another way to write them, where there are no asynchronous writes."""
    (files / "store").mkdir()

    def commits(directory: Path) -> None:
        with pmstore.open(directory / "x.pm", media="file") as store:
            x = store.create_array("x", 100_000)
            store.commit()
            for i in range(3):
                x[::500] = i + 1.0  # a bit of each of 196 pages
                store.commit()

    recording = record(commits, files / "store")
    image = final(recording)
    (files / "copy.pm").write_bytes(image["x.pm"])
    with pmstore.open(files / "copy.pm") as store:
        assert (store["x"][::500] == 3).all() and not store.check()


def test_stores_to_a_mapping(python: Recorded, files: Path) -> None:
    (files / "f").write_bytes(bytes(3000))
    recording = python("""
        import mmap
        f = os.open(d + "/f", os.O_RDWR)
        m = mmap.mmap(f, 3000)
        m[0:3] = b"one"
        m.flush()
        m[2999] = 7
        print("stored", flush=True)
        m[0:3] = b"two"
        """)
    assert kinds(recording) == ["write", "sync range", "write", "said", "write"]
    assert [event.offset for event in recording.events if event.kind == "write"] == [0, 2560, 0]
    assert final(recording)["f"][:3] == b"two"


def test_what_was_said_in_lines(python: Recorded) -> None:
    recording = python("""
        print("one", 1)
        open(d + "/f", "w").close()
        print("two", 2, "\\nthree")
        sys.stdout.write("no end")
        """)
    said = [event.data for event in recording.events if event.kind == "said"]
    assert b"".join(said) == b"one 1\ntwo 2 \nthree\nno end"
    assert kinds(recording)[:2] == ["said", "create"]
    assert said[0] == b"one 1\n" and said[-1] == b"no end"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_c_programs_stdio_and_raw_calls(files: Path, tmp_path: Path) -> None:
    source = tmp_path / "save.c"
    source.write_text(
        textwrap.dedent("""\
            #include <stdio.h>
            #include <sys/syscall.h>
            #include <unistd.h>
            int main(int argc, char **argv)
            {
                FILE *file = fopen(argv[argc - 1], "w");
                fprintf(file, "by stdio");
                fflush(file);
                syscall(SYS_pwrite64, fileno(file), "B", 1, 0);
                fsync(fileno(file));
                puts("saved");
                return fclose(file);
            }
            """)
    )
    flags = [["-static"], []]
    built = [subprocess.run(["cc", *flag, "-o", tmp_path / "save", source], capture_output=True) for flag in flags[:1]]
    if built[0].returncode:
        subprocess.run(["cc", "-o", tmp_path / "save", source], check=True)
    recording = record([str(tmp_path / "save"), str(files / "f")], files)
    assert final(recording) == {"f": b"By stdio"}
    assert kinds(recording) == ["create", "write", "write", "sync file", "said"]


def test_a_process_tree(files: Path) -> None:
    (files / "a").write_text("from here")
    recording = record(["sh", "-c", f"cd {files}; (echo x > t; mv t b) & wait; cat a b > c; sync c; echo done"], files)
    assert final(recording) == {"a": b"from here", "b": b"x\n", "c": b"from herex\n"}
    assert kinds(recording)[-2:] == ["sync file", "said"]


def test_a_function_in_a_child(files: Path) -> None:
    seen = []

    def saves(directory: Path) -> None:
        seen.append(1)
        (directory / "f").write_text("by a function")
        print("saved")

    recording = record(saves, files)
    assert final(recording) == {"f": b"by a function"} and recording.said == b"saved\n"
    assert not seen


def test_only_the_directory_is_recorded(python: Recorded, tmp_path: Path) -> None:
    recording = python(f"""
        open({str(tmp_path / "elsewhere")!r}, "w").write("not this")
        os.fsync(os.open({str(tmp_path)!r}, os.O_RDONLY))
        open(d + "/f", "w").write("this")
        """)
    assert kinds(recording) == ["create", "write"]


def test_threads_that_take_turns(python: Recorded) -> None:
    recording = python("""
        import threading
        def save(name):
            with open(d + "/" + name, "w") as f:
                f.write(name)
        for name in "abc":
            thread = threading.Thread(target=save, args=[name])
            thread.start()
            thread.join()
        """)
    assert final(recording) == {"a": b"a", "b": b"b", "c": b"c"}


AT_ONCE = """
    import threading
    def save(name):
        f = os.open(d + "/" + name, os.O_RDWR | os.O_CREAT)
        for n in range(300):
            os.pwrite(f, b"x", n)
    threads = [threading.Thread(target=save, args=[name]) for name in "abc"]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    """


def test_threads_at_once(python: Recorded, files: Path) -> None:
    with pytest.raises(CrashTestError, match="two threads or processes .* --allow-threads"):
        python(AT_ONCE)
    recording = python(AT_ONCE, allow_threads=True)
    assert final(recording) == dict.fromkeys("abc", b"x" * 300)


@pytest.mark.parametrize(
    "code, message",
    [
        ("sys.exit(3)", "ended with status 3; a crash test needs a run that succeeds"),
        ("raise ValueError('on purpose')", "ValueError: on purpose"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        (
            "open(d + '/../outside', 'w').close(); os.rename(d + '/../outside', d + '/f')",
            "give --files a directory that",
        ),
        ("import ctypes; ctypes.CDLL(None).syscall(425, 8, 0)", "uses io_uring.*UV_USE_IO_URING=0"),
    ],
)
def test_programs_that_cannot_be_recorded(python: Recorded, code: str, message: str) -> None:
    with pytest.raises(CrashTestError, match=message):
        python(code)


def test_where_tracing_is_refused(files: Path, tmp_path: Path) -> None:
    """A process that is traced already can't be traced again."""

    def traced_again(directory: Path) -> None:
        record(["true"], directory)

    with pytest.raises(CrashTestError, match=r"(?s)tracing \(ptrace\) is not allowed here.*--cap-add=SYS_PTRACE"):
        record(traced_again, files)


def test_a_function_that_fails(files: Path) -> None:
    def fails(directory: Path) -> None:
        raise KeyError("on purpose")

    with pytest.raises(CrashTestError, match=r"(?s)the function ended with status 1.*KeyError: 'on purpose'"):
        record(fails, files)


def test_what_is_not_there(files: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashTestError, match="there is no program 'no-such-program'"):
        record(["no-such-program"], files)
    with pytest.raises(CrashTestError, match="is no directory: make it"):
        record(["true"], tmp_path / "missing")


def test_changes_by_others_are_noticed(files: Path) -> None:
    """A process that isn't traced writes to the directory, while the traced one waits for it."""
    (files / "f").write_text("before")
    ready, done = files.parent / "ready", files.parent / "done"
    os.mkfifo(ready)
    os.mkfifo(done)

    def other() -> None:
        ready.read_text()
        (files / "f").write_text("by another")
        done.write_text("go on")

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(CrashTestError, match="f has changed in a way that the recorded calls don't explain"):
        record(["sh", "-c", f"echo x > {files}/g; echo x > {ready}; cat {done}"], files)
    thread.join()


def test_recordings_are_files(python: Recorded, tmp_path: Path) -> None:
    recording = python("open(d + '/f\\udcff', 'w').write('x')")
    save(tmp_path / "kept", recording, about=[1, 2])
    assert load(tmp_path / "kept") == (recording, {"about": [1, 2]})


def test_recordings_of_another_version(tmp_path: Path) -> None:
    import msgpack

    (tmp_path / "kept").write_bytes(msgpack.packb({"magic": "pmstore files crash", "version": 99}))
    with pytest.raises(CrashTestError, match="version 99 of the format, this pmstore reads version 1"):
        load(tmp_path / "kept")
    (tmp_path / "other").write_bytes(b"something")
    with pytest.raises(CrashTestError, match="is no recording"):
        load(tmp_path / "other")
    with pytest.raises(CrashTestError, match="no such file"):
        load(tmp_path / "missing")
