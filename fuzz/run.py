"""Builds the fuzzer and runs it: `make fuzz`, or this file alone; it needs nothing but Python and a C compiler.

    python fuzz/run.py --runs 60000              a shorter run
    python fuzz/run.py --replay build/fuzz/crashes/crash-…

With clang and libFuzzer the run is guided by coverage; without, the same harness runs on gcc, unguided. The corpus
stays in build/fuzz/corpus and is where the next run begins; build/fuzz/crashes gets the inputs that fail.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SANITIZERS = "-fsanitize=address,undefined"
COVERAGE = "-fsanitize-coverage=inline-8bit-counters,pc-table"
FLAGS = [
    *("-std=gnu11", "-g", "-fno-omit-frame-pointer", "-pthread", SANITIZERS, "-fno-sanitize-recover=undefined"),
    *("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes"),
    "-Dgetrandom=fuzz_getrandom",  # the same input does the same again
]
STAGE = ["-Dposix_memalign=fuzz_memalign", "-Dfree=fuzz_free"]  # see stage.c
OPTIONS = {
    # Freed memory is kept from reuse, but not so much that every execution works on fresh pages.
    "ASAN_OPTIONS": "quarantine_size_mb=8:malloc_context_size=8:abort_on_error=1"
    ":allocator_release_to_os_interval_ms=-1",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
}
BASES = 16  # in bases.c
LONGEST = 772  # FUZZ_MOST in fuzz.h
PROGRESS_SECONDS = 20.0


class Compiler(NamedTuple):
    """What the fuzzer is built with."""

    command: str
    guided: bool  # clang with libFuzzer


class Result(NamedTuple):
    """What one job reports of itself."""

    status: int
    executions: int
    edges: int
    log: Path


def say(text: str) -> None:
    """Prints a line at once."""
    print(f"fuzz: {text}", flush=True)


# ---- the compiler


def has_fuzzer(command: str) -> bool:
    """Whether this clang can link a program with libFuzzer and the sanitizers."""
    if shutil.which(command) is None:
        return False
    source = "int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return (int)(n && !d); }\n"
    with tempfile.TemporaryDirectory() as directory:
        build = [command, "-x", "c", "-", "-fsanitize=fuzzer,address,undefined", "-o", f"{directory}/a.out"]
        return subprocess.run(build, input=source, capture_output=True, text=True, check=False).returncode == 0


def find_clang() -> str | None:
    """A clang with libFuzzer, if there is one."""
    names = ["clang", *(f"clang-{version}" for version in range(22, 11, -1))]
    return next((name for name in names if has_fuzzer(name)), None)


def install_clang() -> None:
    """Asks apt for clang and libFuzzer of one version; whether that worked is seen afterwards."""
    say("installing clang and libFuzzer …")
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")

    def apt(*arguments: str) -> str:
        return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False).stdout

    apt("apt-get", "update", "-qq")
    found = re.search(r"Depends: clang-(\d+)", apt("apt-cache", "depends", "clang"))
    if found:
        packages = [f"clang-{found[1]}", f"libfuzzer-{found[1]}-dev"]
        apt("apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages)


def choose_compiler(wanted: str) -> Compiler:
    """clang with libFuzzer where it is or can be had; otherwise the C compiler that builds the core."""
    if wanted != "gcc":
        clang = find_clang()
        if clang is None and os.geteuid() == 0 and shutil.which("apt-get"):
            install_clang()
            clang = find_clang()
        if clang is not None:
            return Compiler(clang, True)
        say("no clang with libFuzzer: not guided by coverage. Install it: apt-get install clang libfuzzer-14-dev")
        if wanted == "clang":
            sys.exit(1)
    command = os.environ.get("CC", "cc")
    if shutil.which(command) is None:
        sys.exit(f"fuzz: no C compiler ({command}). Install one: apt-get install gcc libc6-dev")
    return Compiler(command, False)


# ---- building


def build(compiler: Compiler, core: Path, out: Path, jobs: int, extra: list[str]) -> Path:
    """Compiles what has changed of the core and the harness, and links it; returns the program."""
    objects = out / ("guided" if compiler.guided else "unguided")
    objects.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, "-O2" if compiler.guided else "-O1", *extra]
    headers = b"".join(header.read_bytes() for header in [*sorted(core.rglob("*.h")), HERE / "fuzz.h"])

    def compile_one(source: Path) -> Path:
        own = [*flags, "-Werror"]
        if core in source.parents:
            own = [*flags, *([COVERAGE] if compiler.guided and source.name != "hash.c" else [])]
            own += STAGE if source.name == "writer.c" else []
        key = hashlib.sha256(headers + source.read_bytes() + repr((compiler, own)).encode()).hexdigest()[:16]
        target = objects / f"{source.stem}-{key}.o"
        if not target.exists():
            unfinished = target.with_suffix(".tmp")
            places = [f"-iquote{core}", f"-iquote{HERE}"]
            command = [compiler.command, *own, *places, "-c", str(source), "-o", str(unfinished)]
            subprocess.run(command, check=True)
            unfinished.rename(target)
        return target

    # The crash explorer stands on the core; no store needs it.
    store = [source for source in sorted(core.rglob("*.c")) if source.parent.name not in ("explore", "python")]
    harness = [source for source in sorted(HERE.glob("*.c")) if not (compiler.guided and source.name == "driver.c")]
    with ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(compile_one, source) for source in [*store, *harness]]
        try:
            compiled = [future.result() for future in work]
        finally:
            pool.shutdown(cancel_futures=True)
    for old in set(objects.glob("*.o")) - set(compiled):
        old.unlink()
    program = objects / "fuzz"
    link = [SANITIZERS, "-pthread", *(["-fsanitize=fuzzer"] if compiler.guided else [])]
    subprocess.run([compiler.command, *link, *map(str, compiled), "-lm", "-o", str(program)], check=True)
    return program


# ---- running


def write_seeds(corpus: Path) -> None:
    """One input for each base and way: no edit, opened as either medium, for damage and for hostile edits."""
    for base in range(BASES):
        for flags in range(4):
            (corpus / f"seed-{base:02}-{flags}").write_bytes(bytes([flags, base, 0, 0]))


def latest(log: Path) -> tuple[int, int]:
    """Executions and edges so far, by the log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    numbers = re.findall(r"^#(\d+)\s", text, flags=re.MULTILINE)
    edges = re.findall(r" cov: (\d+)", text)
    return int(numbers[-1]) if numbers else 0, int(edges[-1]) if edges else 0


def run_jobs(program: Path, guided: bool, out: Path, runs: int, jobs: int, seed: int) -> list[Result]:
    """Runs the jobs at the same time; all end when one has failed."""
    crashes = out / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    folders = [out / "corpus" / str(job) for job in range(jobs)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        write_seeds(folder)
    processes, logs = [], [out / f"job-{job}.log" for job in range(jobs)]
    for job in range(jobs):
        share = runs // jobs + (job < runs % jobs)
        command = [str(program), f"-runs={share}", f"-seed={seed + job}", f"-artifact_prefix={crashes}/"]
        if guided:
            command += [f"-max_len={LONGEST}", "-timeout=25", "-rss_limit_mb=4096", "-reload=0", "-print_final_stats=1"]
            command += [str(folders[job]), *(str(folder) for folder in folders if folder != folders[job])]
        with logs[job].open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **OPTIONS}))
    start = shown = time.monotonic()
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:
                process.terminate()
        try:
            next(process for process in processes if process.poll() is None).wait(1)
        except (StopIteration, subprocess.TimeoutExpired):
            pass
        now = time.monotonic()
        if now - shown >= PROGRESS_SECONDS:
            shown, done = now, sum(latest(log)[0] for log in logs)
            say(f"{done:,} of {runs:,} executions, {done / (now - start):,.0f} per second")
    return [Result(process.returncode, *latest(log), log) for process, log in zip(processes, logs, strict=True)]


def explain(log: Path) -> None:
    """The lines of a failed job's log that say what happened."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"^fuzz: (?!\d)|ERROR:|runtime error", line)), 0)
    print("\n".join(lines[max(first, len(lines) - 400) :][:60]))


def report(results: list[Result], guided: bool, elapsed: float, replay: str) -> int:
    """Prints the figures; 1 if a job failed. replay: the command, but for the input."""
    executions = sum(result.executions for result in results)
    edges = f", {max(result.edges for result in results)} edges covered" if guided else ", not guided by coverage"
    failed = next((result for result in results if result.status > 0 or result.status == -6), None)
    for result in results:
        text = result.log.read_text(encoding="utf-8", errors="replace")
        for line in re.findall(r"^fuzz: \d+ executions: .*$", text, flags=re.MULTILINE):
            print(line)
    say(f"{executions:,} executions in {elapsed:.0f} s, {executions / max(elapsed, 1e-3):,.0f} per second{edges}")
    if failed is None and all(result.status == 0 for result in results):
        return 0
    failed = failed or next(result for result in results if result.status)
    explain(failed.log)
    written = re.findall(r"Test unit written to (\S+)", failed.log.read_text(encoding="utf-8", errors="replace"))
    say(f"failed; the log is {failed.log}")
    for name in written:
        say(f"replay it: {replay} --replay {os.path.relpath(name)}")
    return 1


def main() -> int:
    """Parses the command line, builds, runs."""
    parser = argparse.ArgumentParser(description="Fuzzing of damaged store files.", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1_000_000, help="executions, of all jobs together")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=Path, default=ROOT / "csrc", help="the folder of C files to fuzz")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--compiler", choices=["auto", "clang", "gcc"], default="auto")
    parser.add_argument("--define", action="append", default=[], metavar="NAME", help="a macro")
    parser.add_argument("--replay", nargs="+", type=Path, metavar="INPUT", help="execute these inputs, and no more")
    arguments = parser.parse_args()
    if arguments.runs < 1 or arguments.jobs < 1 or arguments.seed < 1:
        parser.error("--runs, --jobs and --seed must be at least 1")
    core, out = arguments.core.resolve(), arguments.out.resolve()
    compiler = choose_compiler(arguments.compiler)
    try:
        program = build(compiler, core, out, arguments.jobs, [f"-D{name}" for name in arguments.define])
    except subprocess.CalledProcessError as error:
        say(f"the fuzzer does not build: {' '.join(error.cmd[-4:])}")
        return 1
    if arguments.replay:
        crashes = out / "crashes"  # where the program leaves the input once more
        crashes.mkdir(parents=True, exist_ok=True)
        command = [str(program), *(str(path.resolve()) for path in arguments.replay)]
        return int(subprocess.run(command, env={**os.environ, **OPTIONS}, cwd=crashes, check=False).returncode != 0)
    start = time.monotonic()
    how = f"{compiler.command}, {'guided by coverage' if compiler.guided else 'not guided by coverage'}"
    say(f"{arguments.runs:,} executions in {arguments.jobs} jobs, seed {arguments.seed} ({how})")
    results = run_jobs(program, compiler.guided, out, arguments.runs, arguments.jobs, arguments.seed)
    same = ["python3", os.path.relpath(HERE / "run.py"), "--compiler", "clang" if compiler.guided else "gcc"]
    same += [f"--define={name}" for name in arguments.define]
    if core != ROOT / "csrc":
        same += ["--core", os.path.relpath(core)]
    if out != ROOT / "build" / "fuzz":
        same += ["--out", os.path.relpath(out)]
    return report(results, compiler.guided, time.monotonic() - start, " ".join(same))


if __name__ == "__main__":
    sys.exit(main())
