"""Builds two extension modules from the C files beside this one, and says how C is compiled here.

- ``pmstore._pmcore``: the store.
- ``pmstore.testing._pmexplorer``: the crash explorer and the tracer, with a core of its own, which recovers the states.

Both are linked with one library, in which the core is compiled once. setup.py hands ``core`` and ``explorer`` to cffi,
and compiles the library, and what is in python/, with the same flags. Run as a script, this file
needs nothing but Python itself:

    python csrc/build_core.py            says in one line which tool is missing, and exits with 1, or is silent
    python csrc/build_core.py --flags    prints the compiler's flags and Python's headers, for `make strict`

The environment variable PMSTORE_CFLAGS adds flags at the end, for compiling and linking: CI puts sanitizers there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cffi import FFI

HERE = Path(__file__).parent

# No -march: the core asks the processor at run time which instructions it has.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wstrict-prototypes",
    # The caller may be a thread with the smallest stack that Python allows, 32 KiB.
    "-Wframe-larger-than=8192",
]

# For compilers that have them: a frame larger than a page touches each of its pages. So a stack that is too small ends
# in a signal, and no memory behind the guard page is written.
OPTIONAL_FLAGS = ["-fstack-clash-protection"]

LIBRARY = "pmcore"

# Folders that are no part of the core: the crash explorer and the tracer, and what is written against Python.
EXPLORER, PYTHON = "explore", "python"

# What cffi generates after this line takes parameters that it does not use.
QUIET = """\
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wcast-function-type"
#pragma GCC diagnostic ignored "-Wshadow"
"""


def extra_flags() -> list[str]:
    """What PMSTORE_CFLAGS asks for."""
    return shlex.split(os.environ.get("PMSTORE_CFLAGS", ""))


def compiler() -> list[str]:
    """The C compiler's command."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def flags() -> list[str]:
    """All flags for compiling: where headers are, FLAGS, those of OPTIONAL_FLAGS that this compiler has, and
    PMSTORE_CFLAGS.
    """

    def has(flag: str) -> bool:
        command = [*compiler(), "-Werror", flag, "-fsyntax-only", "-x", "c", "-"]
        try:
            return subprocess.run(command, input="int x;\n", capture_output=True, text=True).returncode == 0
        except OSError:
            return False

    include = f"-I{os.path.relpath(HERE)}"
    return [include, *FLAGS, *(flag for flag in OPTIONAL_FLAGS if has(flag)), *extra_flags()]


def python_headers() -> list[str]:
    """The directory of Python.h."""
    paths = sysconfig.get_paths()
    return [f"-I{paths['include']}", f"-I{paths['platinclude']}"]


def declarations(header: str) -> str:
    """The part of a header that cffi reads."""
    text = (HERE / header).read_text(encoding="utf-8")
    begin, end = "/* cffi: begin */", "/* cffi: end */"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{header} must hold {begin} and {end} once each")
    return text.partition(begin)[2].partition(end)[0]


def files(*suffixes: str) -> list[Path]:
    """C files, or others, as paths from where setup.py runs, but for those in python/."""
    found = sorted(path for path in HERE.rglob("*") if path.name.endswith(suffixes) and path.parent.name != PYTHON)
    return [Path(os.path.relpath(path)) for path in found]


def sources(explorer: bool) -> list[str]:
    """The C files of the core, or those of the explorer."""
    return [str(path) for path in files(".c") if (path.parent.name == EXPLORER) == explorer]


def depends() -> list[str]:
    """What all of them are compiled anew for."""
    return [str(path) for path in files(".h", ".py")]


def library() -> tuple[str, dict[str, Any]]:
    """The core, for setuptools' build_clib."""
    return LIBRARY, {"sources": sources(explorer=False), "obj_deps": {"": depends()}, "cflags": flags()}


def extension(name: str, headers: list[str], own: list[str]) -> FFI:
    """A cffi builder. headers: what Python may call. own: C files beside the core's."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef("\n".join(map(declarations, headers)))
    ffi.set_source(
        name,
        "".join(f'#include "{header}"\n' for header in headers) + QUIET,
        sources=own,
        depends=[*sources(explorer=False), *depends()],
        extra_compile_args=flags(),
        extra_link_args=["-pthread", *extra_flags()],
    )
    return ffi


def core() -> FFI:
    """The store."""
    return extension("pmstore._pmcore", ["pmstore.h", "reader/reader.h", "codecs/planes.h"], [])


def explorer() -> FFI:
    """The crash explorer and the tracer."""
    headers = ["pmstore.h", "explore/crash.h", "explore/tracer.h"]
    return extension("pmstore.testing._pmexplorer", headers, sources(explorer=True))


def missing_tool() -> str | None:
    """One line that says what to install before the extension can be built, or None."""
    if sys.platform != "linux":
        return f"pmstore runs on Linux only, not on {sys.platform}."
    command = compiler()
    if shutil.which(command[0]) is None:
        return (
            f"pmstore: no C compiler ({command[0]}). "
            "Install one: apt-get install gcc libc6-dev (Fedora: dnf install gcc)."
        )

    def compiles(header: str, *more: str) -> bool:
        arguments = [*command, *more, "-fsyntax-only", "-x", "c", "-"]
        return subprocess.run(arguments, input=f"#include <{header}>\n", capture_output=True, text=True).returncode == 0

    if not compiles("sys/mman.h"):
        return (
            "pmstore: the C library's headers are missing. "
            "Install them: apt-get install libc6-dev (Fedora: dnf install glibc-devel)."
        )
    if not compiles("Python.h", *python_headers()):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"pmstore: Python.h of Python {version} is missing. "
            f"Install it: apt-get install python{version}-dev (Fedora: dnf install python3-devel)."
        )
    return None


if __name__ == "__main__":
    if sys.argv[1:] == ["--flags"]:
        print(shlex.join(python_headers() + flags()))
    else:
        sys.exit(missing_tool())
