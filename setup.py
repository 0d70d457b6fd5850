"""The compiled part of the build; everything else about the package is in pyproject.toml."""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

BUILDER = Path("csrc") / "build_core.py"


class BuildCore(build_ext):
    """build_ext that names a missing tool before the compiler does so in a hundred lines."""

    def run(self) -> None:
        problem = build["missing_tool"]()
        if problem:
            raise SystemExit(problem)
        self.get_finalized_command("build_clib").force = self.force  # type: ignore[union-attr]
        self.run_command("build_clib")
        super().run()


class BuildLibrary(build_clib):
    """build_clib whose library holds no object of a C file that is no more: an archive is only added to."""

    def build_libraries(self, libraries: list[tuple[str, dict[str, Any]]]) -> None:
        for name, _ in libraries:
            Path(self.build_clib, f"lib{name}.a").unlink(missing_ok=True)
        super().build_libraries(libraries)


# Free-threaded Pythons have no stable ABI yet; cffi then builds for the one version.
stable_abi = not sysconfig.get_config_var("Py_GIL_DISABLED")

build = runpy.run_path(str(BUILDER))
locks = Extension(
    "pmstore._locks",
    sources=sorted(str(path) for path in BUILDER.parent.joinpath("python").glob("*.c")),
    depends=sorted(str(path) for path in BUILDER.parent.joinpath("python").glob("*.h")),
    define_macros=[("Py_LIMITED_API", "0x030a0000")] if stable_abi else [],
    py_limited_api=stable_abi,
    extra_compile_args=build["flags"](),
    extra_link_args=build["extra_flags"](),
)

setup(
    cffi_modules=[f"{BUILDER}:core", f"{BUILDER}:explorer"],
    ext_modules=[locks],
    libraries=[build["library"]()],
    cmdclass={"build_clib": BuildLibrary, "build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if stable_abi else {},
)
