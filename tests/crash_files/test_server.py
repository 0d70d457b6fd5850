"""Checks that are Python scripts: the server that forks for each state, and the isolation of the states."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pmstore.testing._files import serving
from pmstore.testing._files.evaluator import CommandCheck, Evaluator
from pmstore.testing._files.model import File, Image

Check = Callable[..., CommandCheck]


def image(content: bytes = b"whole") -> Image:
    return {"run": File("file", 2, 0o644, content, content)}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the module `library` to another directory than that of the check."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=os.pathsep)

    def write(text: str) -> None:
        (tmp_path / "lib" / "library.py").write_text(text)

    return write


@pytest.fixture
def check(tmp_path: Path) -> Check:
    (tmp_path / "own").mkdir()

    def make(text: str, *, python: str = sys.executable, timeout: float = 60) -> CommandCheck:
        (tmp_path / "own" / "check.py").write_text(
            "import sys, os, signal\nfrom pathlib import Path\n"
            "directory, said = Path(sys.argv[1]), Path(sys.argv[2]).read_text()\n"
            "content = (directory / 'run').read_bytes()\n" + text
        )
        return CommandCheck(f"{python} {tmp_path}/own/check.py {{dir}} {{said}}", timeout)

    return make


ENDS = """
if content == b"status": sys.exit(7)
if content == b"sentence": sys.exit("what was said is gone")
if content == b"raised": raise ValueError("no number")
if content == b"exit": os._exit(3)
if content == b"killed": os.kill(os.getpid(), signal.SIGKILL)
if content == b"interrupt": raise KeyboardInterrupt
if content == b"large": sys.exit(256 + 5)
if content == b"too large": sys.exit(1 << 64)
if content == b"closed": sys.stdout.close(); sys.exit(9)
if content == b"said": assert said == "saved 1" and os.environ["PMSTORE_CRASH_SAID"] == sys.argv[2], said
if content == b"input": assert not sys.stdin.read()
if content == b"main":
    assert __name__ == "__main__" and sys.modules["__main__"].content is content
    assert sys.path[0] == str(Path(__file__).parent)
if content == b"thread":
    import threading, time
    threading.Thread(target=lambda: (time.sleep(0.05), os._exit(4))).start()
if content == b"at exit":
    import atexit
    atexit.register(os._exit, 6)
if content == b"printed":
    print("out", flush=True)
    print("then err", file=sys.stderr)
    print("out at the end")
    sys.exit(1)
"""


def test_every_end_is_that_of_a_process_of_its_own(check: Check) -> None:
    made = check(ENDS)
    names = [line.split('b"')[1].split('"')[0] for line in ENDS.splitlines() if line.startswith("if content")]
    with Evaluator(made) as evaluate:
        assert evaluate(image(), b"saved 1") is None
        made.doubted = False
        for name in names:
            found = evaluate(image(name.encode()), b"saved 1")
            assert made.servers is not None and made.servers.usable
            assert found == alone(made, tmp=evaluate.scratch, content=name.encode()), name
            assert (found is None) == (name in ("said", "input", "main")), name
            assert evaluate(image(), b"saved 1") is None


def alone(made: CommandCheck, tmp: Path, content: bytes) -> str | None:
    (tmp / "run").write_bytes(content)
    return made.alone(tmp, b"saved 1")


TOUCHES = """
import json, locale, random, tempfile, threading, warnings
assert not hasattr(json, "touched") and "TOUCHED" not in os.environ and os.getcwd() == CWD
assert os.listdir(directory) == ["run"] and content == b"whole"
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and os.umask(0o77) == UMASK
assert len(os.listdir("/proc/self/fd")) < 10
assert threading.active_count() == 1
json.touched = os.environ["TOUCHED"] = "x"
os.chdir("/")
(directory / "run").write_text("changed")
(directory / "more").mkdir()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leaked = [open("/dev/null") for _ in range(20)]
threading.Thread(target=signal.pause, daemon=True).start()
if os.fork() == 0:
    signal.pause()
"""


def test_states_are_isolated(check: Check) -> None:
    umask = os.umask(0)
    os.umask(umask)
    values = f"CWD, UMASK = {os.getcwd()!r}, {umask}\n"
    with Evaluator(check(values + TOUCHES)) as evaluate:
        for _ in range(5):
            assert evaluate(image(), b"") is None


def test_libraries_are_imported_once(check: Check, library: Callable[[str], None], tmp_path: Path) -> None:
    """The check's own modules run for each state, and find the library as it is after its import."""
    library(f"open({str(tmp_path / 'count')!r}, 'a').write('x'); value = []")
    made = check("import library, own; library.value.append(1); assert library.value == [1]")
    (tmp_path / "own" / "own.py").write_text(f"open({str(tmp_path / 'own_count')!r}, 'a').write('x')")
    with Evaluator(made) as evaluate:
        for _ in range(6):
            assert evaluate(image(), b"") is None
    assert (tmp_path / "count").read_text() == "xx"  # the first state, and the server
    assert (tmp_path / "own_count").read_text() == "xxxxxx"


@pytest.mark.parametrize("change", ["os.environ['PLACE'] = str(directory)", "os.chdir(directory)"])
def test_a_library_that_depends_on_what_the_check_has_set_before_its_import(
    check: Check, library: Callable[[str], None], change: str
) -> None:
    library("import os; place = os.environ.get('PLACE', os.getcwd())")
    made = check(f"{change}; import library; assert open(library.place + '/run').read() == 'whole'")
    with Evaluator(made) as evaluate:
        for _ in range(3):
            assert evaluate(image(), b"") is None
        assert made.servers is not None and made.servers.usable
        assert evaluate(image(b"torn"), b"") == "AssertionError (status 1)"


def test_the_environment_that_a_library_sets_itself(
    check: Check, library: Callable[[str], None], tmp_path: Path
) -> None:
    """It is imported once nevertheless."""
    library(f"import os; os.environ['SET'] = '1'; open({str(tmp_path / 'count')!r}, 'a').write('x')")
    with Evaluator(check("import library")) as evaluate:
        for _ in range(4):
            assert evaluate(image(), b"") is None
    assert (tmp_path / "count").read_text() == "xx"


def test_numpy_draws_other_numbers_in_each_state(check: Check, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"
    made = check(f"import numpy; print(numpy.random.randint(1 << 62), file=open({str(drawn)!r}, 'a'))")
    with Evaluator(made) as evaluate:
        for _ in range(4):
            assert evaluate(image(), b"") is None
    assert len(set(drawn.read_text().split())) == 4


def test_a_check_that_starts_itself_again(check: Check) -> None:
    made = check(
        "if 'AGAIN' not in os.environ:\n    os.environ['AGAIN'] = '1'; os.execv(sys.executable, sys.orig_argv)\n"
        "assert content == b'whole', 'torn'"
    )
    made.doubted = False
    with Evaluator(made) as evaluate:
        for _ in range(2):
            assert evaluate(image(), b"") is None
            assert evaluate(image(b"torn"), b"") == "AssertionError: torn (status 1)"


def test_a_state_is_written_again_when_its_server_is_lost(check: Check) -> None:
    """The check has changed the files by then."""
    made = check(
        "(directory / 'more').mkdir()\n"
        "parent = Path(f'/proc/{os.getppid()}/cmdline').read_bytes()\n"
        "if content == b'kill' and b'check_server' in parent: os.kill(os.getppid(), signal.SIGKILL)"
    )
    made.doubted = False
    with Evaluator(made) as evaluate:
        assert evaluate(image(), b"") is None
        assert evaluate(image(b"kill"), b"") is None
        assert made.servers is not None and not made.servers.usable


def test_a_lost_server_leaves_no_check_behind(check: Check, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    made = check(
        "parent = Path(f'/proc/{os.getppid()}/cmdline').read_bytes()\n"
        f"if content != b'kill' or b'check_server' not in parent: sys.exit()\npipe = open({str(fifo)!r}, 'w')\n"
        "os.fork() and os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    )
    made.doubted = False
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe, Evaluator(made) as evaluate:
        assert evaluate(image(), b"") is None
        assert evaluate(image(b"kill"), b"") is None
        assert select.select([pipe], [], [], 60)[0], "it runs on"


def test_a_lost_server_of_a_container_ends_no_process_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of processes there are those of others here."""
    enter = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces")
    python, script, fifo = tmp_path / "python", tmp_path / "check.py", tmp_path / "fifo"
    python.write_text(f'#!/bin/sh\nexec {" ".join(enter)} {sys.executable} "$@"\n')
    python.chmod(0o755)
    script.write_text(f"import signal\npipe = open({str(fifo)!r}, 'w')\nsignal.pause()\n")
    os.mkfifo(fifo)
    killed: list[int] = []
    monkeypatch.setattr(serving, "_kill", killed.append)
    words = [str(python), str(script)]
    servers = serving.Servers(words, 1, 60, None)
    thread = threading.Thread(target=servers.run, args=(words, b""))
    thread.start()
    with open(fifo, "rb") as pipe:
        servers.all[0].process.kill()
        assert pipe.read() == b""
    thread.join()
    servers.close()
    assert not servers.usable and not killed


def test_a_library_whose_import_never_ends_in_the_server(
    check: Check, library: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library("import builtins, signal\nif not hasattr(builtins, 'prepared'): signal.pause()")
    made = check("import builtins; builtins.prepared = True; import library", timeout=1)
    with Evaluator(made) as evaluate:
        assert evaluate(image(), b"") is None
        monkeypatch.setattr("pmstore.testing._files.serving.END", 0.1)
        assert made.servers is not None
        made.servers.all[0].socket.settimeout(0.1)
        assert evaluate(image(), b"") is None
        assert not made.servers.usable


def test_another_module_of_the_same_name_is_not_taken(
    check: Check, library: Callable[[str], None], tmp_path: Path
) -> None:
    """The check finds its module by a path that it sets itself."""
    library("raise RuntimeError('not this one')")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "library.py").write_text("value = 1")
    with Evaluator(
        check(f"sys.path.insert(0, {str(tmp_path / 'other')!r}); import library; library.value")
    ) as evaluate:
        for _ in range(3):
            assert evaluate(image(), b"") is None


@pytest.mark.parametrize(
    "text",
    [
        "import os; pid = os.getpid()",  # it does not work in a fork
        "import os, signal, threading; threading.Thread(target=signal.pause, daemon=True).start(); pid = os.getpid()",
        "import os, sys; pid = os.getpid(); 'server' in sys.modules['__main__'].__file__ and os._exit(1)",
    ],
)
def test_a_library_that_does_not_work_in_a_fork(check: Check, library: Callable[[str], None], text: str) -> None:
    """Each state gets a new process then. The failure that showed it is none."""
    library(text)
    made = check("import library; assert library.pid == os.getpid()")
    with Evaluator(made) as evaluate:
        for _ in range(4):
            assert evaluate(image(), b"") is None
        assert made.servers is not None and not made.servers.usable


def test_the_first_failure_is_confirmed_on_the_files_as_they_were(check: Check) -> None:
    made = check("(directory / 'run').write_text('whole'); assert content == b'whole', content.decode()")
    with Evaluator(made) as evaluate:
        assert evaluate(image(b"torn"), b"") == "AssertionError: torn (status 1)"
        assert not made.doubted
        assert evaluate(image(b"torn, too"), b"") == "AssertionError: torn, too (status 1)"
        assert made.servers is not None and made.servers.usable


def test_a_check_that_hangs_ends_with_all_that_it_started(check: Check, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    made = check(
        f"pipe = open({str(fifo)!r}, 'w') if content == b'hangs' else sys.exit()\nos.fork(); signal.pause()",
        timeout=0.5,
    )
    made.doubted = False
    ended = threading.Thread(target=lambda: fifo.open().read())
    ended.start()
    with Evaluator(made) as evaluate:
        assert evaluate(image(b"hangs"), b"") == "the check took longer than 0.5 s"
        ended.join()
        assert evaluate(image(), b"") is None


def test_a_check_that_runs_can_be_stopped(check: Check, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    made = check(f"pipe = open({str(fifo)!r}, 'w'); os.fork(); signal.pause()")
    made.doubted = False
    found: list[str | None] = []
    with Evaluator(made) as evaluate:
        thread = threading.Thread(target=lambda: found.append(evaluate(image(), b"")))
        thread.start()
        with fifo.open() as pipe:
            evaluate.stop()
            assert pipe.read() == ""
        thread.join()
    assert found[0] is not None


def test_a_command_that_is_no_python(check: Check, tmp_path: Path) -> None:
    """Neither a program that is called so, nor a script that does not compile, has a server."""
    (tmp_path / "python3").write_text('#!/bin/sh\ngrep -q whole "$2/run" || { echo torn; exit 1; }\n')
    (tmp_path / "python3").chmod(0o755)
    with Evaluator(check("", python=str(tmp_path / "python3"))) as evaluate:
        assert evaluate(image(), b"") is None
        assert evaluate(image(b"torn"), b"") == "torn (status 1)"
    with Evaluator(check("assert (")) as evaluate:
        assert "SyntaxError" in str(evaluate(image(), b""))


@pytest.mark.parametrize("options, served", [("-S", True), ("-I -Bu", True), ("-W error", False), ("-m", False)])
def test_options_of_python(check: Check, options: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARIABLE", "value")
    text = "assert [sys.flags.no_site, sys.flags.isolated] == [VALUES]\nassert os.environ['VARIABLE'] == 'value'"
    values = f"{int('S' in options)}, {int('I' in options)}"
    made = check(text.replace("VALUES", values), python=f"{sys.executable} {options}")
    with Evaluator(made) as evaluate:
        for _ in range(3):
            assert (evaluate(image(), b"") is None) == (options != "-m")
        assert (made.servers is not None and made.servers.usable) == served


def test_threads_have_servers_of_their_own(check: Check) -> None:
    made = check("import json; assert json.loads(content) == json.loads(said)")
    found: list[str | None] = []

    def work(number: int) -> None:
        text = str(number).encode()
        found.extend(evaluate(image(text), text) for _ in range(10))

    with Evaluator(made) as evaluate:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made.servers is not None and 1 <= len(made.servers.all) <= 3
    assert found == [None] * 30
