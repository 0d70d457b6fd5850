# make demo   a fit that is killed, again and again, and still gives the same result
# make test   ruff and the tests of the core, of values and of estimators
# Both set up all that they need in .venv and build/. `make help` lists the rest.

PYTHON ?= python3
CC ?= cc
JOBS ?= 2
SEEDS ?= $(shell seq 1 40)
RUNS ?= 1000000
VERSIONS ?= 1.5 1.6 1.7 1.8
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
VENV := .venv
BIN := $(VENV)/bin
CORE := $(wildcard csrc/*.h csrc/*/*.[ch]) csrc/build_core.py
LINT := build/lint
# Modules are compiled when they are first imported: most of what is installed never is.
INSTALL := -m pip install -qq --disable-pip-version-check --no-compile
SANITIZED := build/sanitize
BENCH := build/bench
RACES := build/tsan
# $(call tests,FOLDER,NAMES): paths of test files.
tests = $(patsubst %,tests/$(1)/test_%.py,$(2))
ESTIMATORS := $(call tests,resume,kmeans kmeans_sharing clusterers mixture decomposition partial_fit sklearn_api history callbacks)
# Folders with targets of their own, which run all their tests.
APART := tests/aarch64 tests/archive tests/codecs tests/crash_files tests/golden tests/interchange tests/scale
# Tests of Python code, or that compile C code themselves: the sanitizers leave them out.
WITHOUT_C := tests/aarch64 tests/interchange tests/mutants tests/power tests/project tests/scale tests/watch \
	$(call tests,store,cli display doctor habits handlers known_types lists_signals shelf tables types) $(call tests,core,build parts versions) \
	$(call tests,archive,aggregate aggregate_crashes archive_command damage drain_crashes each_version export objects places random_writers \
		retrying stale_lists sweeps takeover_moments tuning) $(call tests,derived,derived_handlers) \
	$(call tests,testing,action testing_command testing_describe testing_docs testing_plugin testing_progress) \
	$(call tests,crash_files,explored images server use)

# Of the rest, tests whose every branch of C code, as gcov counts them, others reach too: make torture runs these as well.
REACHED_BY_OTHERS := tests/archive tests/crash_files $(call tests,store,attributes compact dump growing interrupted_openings \
		lists lost_updates names object_uses objects opened_again opening_limits reading rename store values workers \
		wrong_arguments) \
	$(call tests,golden,archives golden) $(call tests,derived,derived_crashes derived_stored derived_threads) \
	$(call tests,resume,changed_state fingerprint_padding own_values partial_fit_parameters resumable)

SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
THREAD_SANITIZER := -O1 -g -fno-omit-frame-pointer -fsanitize=thread
SANITIZER_ENV = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=1:use_sigaltstack=0:quarantine_size_mb=32 \
	UBSAN_OPTIONS=print_stacktrace=1

# Without files of compiled modules, each of the hundreds of processes compiles what it imports, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-dax test-filesystems test-archive test-crash-files test-golden test-frames test-torch test-scale test-frameworks test-browser test-aarch64 test-gallery docs build strict style lint sanitize tsan long bench bench-docs bench-filesystems paper paper-docs torture power fuzz mutants mutants-lines mutants-reach sklearn pythons oldest wheel release check clean

help:
	@sed -n '1,3s/^# //p' Makefile
	@echo 'make build     .venv with pmstore installed in it, editable'
	@echo 'make style     ruff'
	@echo 'make lint      ruff, mypy --strict, and the tests of lines and words'
	@echo 'make strict    the C files with every warning an error'
	@echo 'make test-browser  the page of pmstore watch --web in Chromium'
	@echo 'make docs      the documentation as a site in build/site, with tests of it and of the gallery'
	@echo 'make test-gallery  the notebooks of docs/gallery, executed; it installs a kernel and pandas'
	@echo 'make test-aarch64  the core for aarch64, under emulation: stores that are killed there are recovered here'
	@echo 'make test-archive  the tests of the archive and its codecs with an S3 server, of export and import with their formats'
	@echo 'make test-frames  frames of pandas and polars and tables of Arrow in stores; it installs the three packages'
	@echo 'make test-torch  tensors and training of torch in stores; it installs a build of torch for CPUs'
	@echo 'make test-crash-files  crashes of other programs, by their system calls'
	@echo 'make test-golden  files of the formats that were released, and their upgrade'
	@echo 'make test-scale  fits over shards, in processes and on dask clusters of two processes; it installs dask and zarr'
	@echo 'make test-frameworks  gradient logs in PyTorch Lightning and Transformers; it installs both, and torch for CPUs'
	@echo 'make test-dax  persistent memory in an emulated Linux guest, whose power is cut; as root it installs QEMU (docs/dax.md)'
	@echo 'make test-filesystems  NFS, SMB, 9p, virtiofs, f2fs, exFAT and others in an emulated Linux guest (docs/file-systems.md)'
	@echo 'make sanitize  the quicker tests of what is written in C under ASan and UBSan'
	@echo 'make tsan      the tests with threads under ThreadSanitizer'
	@echo 'make long      the tests marked long, which make test leaves out'
	@echo 'make torture   the crash tests, for 40 seeds (SEEDS=7 for one), faults, damage, random tests, 2000 kills'
	@echo 'make power     the power of ext4 and xfs is cut under stores (root); CUTS=200, SEED=7, FS="xfs ext4-ordered"'
	@echo 'make fuzz      damaged and hostile files, a million of them; RUNS=60000 for fewer, SEED=7 for others'
	@echo 'make mutants   changes of a copy, which the crash explorer and the other tests have to notice'
	@echo 'make mutants-lines  a sample of all small changes of the code; ARGS="--sample 40 --seed 7 --files csrc/log/log.c"'
	@echo 'make mutants-reach  measures anew which tests reach what, for mutants-lines (a quarter of an hour)'
	@echo 'make sklearn   the tests of the estimators with older versions of scikit-learn; VERSIONS="1.5 1.7" for some'
	@echo 'make pythons   make test with each Python that is here; PYTHONS="python3.10 python3.13" for some'
	@echo 'make oldest    the tests with the oldest versions that pyproject.toml allows of numpy, scikit-learn and the others'
	@echo 'make bench     the benchmarks of benchmarks/README.md; QUICK=1 for a few minutes'
	@echo 'make bench-docs  puts the results of the last full make bench into the documents'
	@echo 'make bench-filesystems  commits on ext4 with a journal and on xfs, on loop devices (root); ARGS=--docs keeps them'
	@echo 'make paper     the experiment of docs/paper.md: checkpoints of KMeans and mixtures; QUICK=1 for two minutes'
	@echo 'make paper-docs  puts the results of the last full make paper into docs/paper.md'
	@echo 'make wheel     wheel and sdist in dist/'
	@echo 'make release   the same, twice and compared, installed and tested, with a list of what they depend on'
	@echo 'make clean     removes all that make has made'

demo: build
	@$(BIN)/python examples/demo.py $(ARGS)

# What ruff needs is installed, and ruff runs, beside the tests.
test: build
	@mkdir -p build; $(MAKE) -s --no-print-directory style >build/style.log 2>&1 & style=$$!; \
		status=0; $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not long' $(APART:%=--ignore=%) \
			--durations=10 $(ARGS) || status=$$?; \
		wait $$style || status=1; cat build/style.log; exit $$status

# Beside what .venv has: moto's server, which speaks S3, s3fs, zarr, h5py and safetensors.
test-archive: build
	@set -e; $(call beside,build/archive,test-archive,)
	@build/archive/bin/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/archive tests/codecs tests/interchange $(ARGS)

# Crashes of other programs, which pmstore.testing explores by their system calls.
test-crash-files: build
	@$(BIN)/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/crash_files $(ARGS)

# Files of the formats that were released.
test-golden: build
	@$(BIN)/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/golden $(ARGS)

# Beside what .venv has: pandas, polars and pyarrow, which also reads shards of .parquet files.
test-frames: build
	@set -e; $(call beside,build/frames,test-frames,)
	@build/frames/bin/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/store/test_known_types.py \
		tests/store/test_live_frames.py tests/store/test_tables.py tests/scale/test_shards.py tests/scale/test_results.py \
		tests/resume/test_frames_in_fits.py $(ARGS)

# Beside what .venv has: torch, built for CPUs. TORCH=torch: with CUDA, for tests/torch/test_gpu.py.
test-torch: build
	@set -e; $(call beside,build/torch,test-torch,$(TORCH))
	@build/torch/bin/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/torch \
		'tests/project/test_docs.py::test_python_blocks_run[training.md]' \
		'tests/project/test_tidy.py::test_public_names_have_docstrings[pmstore.torch]' $(ARGS)

# Beside what .venv has: dask, distributed and zarr. The clusters are processes on this machine.
test-scale: SCALE ?= tests/scale
test-scale: build
	@set -e; $(call beside,build/scale,test-scale,)
	@build/scale/bin/python -m pytest -q -rs -n $(JOBS) --dist loadfile $(SCALE) $(ARGS)

# Where a package is missing, it installs it as root, or says which; without them it runs nothing and succeeds. A failure
# prints the seed of its power cuts.
test-dax: build
	@$(BIN)/python -m tests.dax --jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Where a package is missing, it says which, runs nothing and succeeds. ARGS="nfs smb": these only, as they are called in
# tests/file_systems/inside.py.
test-filesystems: build
	@$(BIN)/python -m tests.file_systems $(ARGS)

# Beside what make test-torch has: PyTorch Lightning, Transformers and Accelerate, with what they need.
test-frameworks: build
	@set -e; $(call beside,build/frameworks,test-frameworks,$(TORCH))
	@build/frameworks/bin/python -m pytest -q -rs -n $(JOBS) --dist worksteal tests/frameworks $(ARGS)

# Without a cross compiler and an emulator of the distribution it says so.
test-aarch64: build
	@if ! { command -v aarch64-linux-gnu-gcc && { command -v qemu-aarch64 || command -v qemu-aarch64-static; }; } >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user …"; \
			apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
				gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null || true; \
		else echo "Install them: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"; \
		fi; fi
	@$(BIN)/python -m pytest -q -rs tests/aarch64 $(ARGS)

# Without a browser of the distribution it says so.
test-browser: build
	@$(BIN)/python $(INSTALL) 'playwright>=1.40'
	@$(BIN)/python -m pytest -q -rs tests/watch/test_browser.py $(ARGS)

# The executed notebooks are in build/gallery, where the site takes them.
test-gallery: build
	@set -e; $(call beside,build/docs,docs,)
	@rm -rf build/gallery && mkdir -p build/gallery
	@PMSTORE_GALLERY=$(CURDIR)/build/gallery build/docs/bin/python -m pytest -q -rs -n $(JOBS) --dist worksteal \
		tests/project/test_gallery.py $(ARGS)

# The tests of its width on a phone and of its search need a browser of the distribution, and say so.
docs: build
	@$(MAKE) -s --no-print-directory test-gallery ARGS=
	@build/docs/bin/python docs/site/build.py build/site
	@PMSTORE_SITE=$(CURDIR)/build/site build/docs/bin/python -m pytest -q -rs tests/project/test_site.py $(ARGS)

build: $(VENV)/.built

# One stamp: a changed C file compiles again, a changed package definition installs again.
$(VENV)/.built: pyproject.toml setup.py $(CORE) | check
	@if [ ! -e $@ ] || [ pyproject.toml -nt $@ ] || [ setup.py -nt $@ ]; then \
		echo "Installing pmstore and what its tests need into $(VENV) …" && \
		$(PYTHON) -m venv $(VENV) && \
		$(BIN)/python $(INSTALL) -e '.[test]'; \
	else \
		echo "Compiling csrc …" && \
		$(BIN)/python setup.py -q build_ext --inplace; \
	fi
	@touch $@

check:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "pmstore: no $(PYTHON). Install it: apt-get install python3 python3-venv python3-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "pmstore: needs Python 3.10 or newer, this is $$($(PYTHON) -V). Choose one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "pmstore: Python's venv is missing. Install it: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) csrc/build_core.py

style: $(LINT)/.built
	@$(LINT)/bin/ruff check -q . && $(LINT)/bin/ruff format -q --check .

# The types are not in make test: mypy takes half a minute of processor time if it has not run before. Lines, files and
# words, which test_tidy.py looks at, are in both: a document that is too wide is known at once.
lint: style
	@$(LINT)/bin/mypy --no-error-summary --python-executable $(BIN)/python
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/project/test_tidy.py >build/tidy.log 2>&1 || \
		{ cat build/tidy.log; exit 1; }

$(LINT)/.built: pyproject.toml | build
	@echo "Installing ruff and mypy into $(LINT) …"
	@$(PYTHON) -m venv --clear $(LINT) && $(LINT)/bin/python $(INSTALL) $(call extra,lint)
	@touch $@

strict: build/strict

# Not in make test: it compiles everything a second time. Only after a change.
build/strict: $(CORE)
	@set -e; flags="$$($(PYTHON) csrc/build_core.py --flags)"; for source in $(filter %.c,$(CORE)); do \
		$(CC) $$flags -Werror -c $$source -o /dev/null; \
	done
	@mkdir -p build && touch $@

# $(call instrumented,FOLDER,LIBRARY,PACKAGE,FLAGS): a copy of the tree, as an editable install has room for one extension only.
define instrumented
	@test -e "$$($(CC) -print-file-name=$(2).so)" || \
		{ echo "pmstore: no $(2). Install it: apt-get install $(3)" >&2; exit 1; }
	@mkdir -p $(1) && rm -rf $(addprefix $(1)/,.github csrc pmstore tests examples benchmarks docs)
	@cp -a .github csrc pmstore tests examples benchmarks docs README.md LICENSE pyproject.toml setup.py pytest_pmstore.py $(1) && rm -f $(1)/pmstore/*.so $(1)/pmstore/testing/*.so
	@cd $(1) && PMSTORE_CFLAGS='$(4)' $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace --force
endef

sanitize: build
	$(call instrumented,$(SANITIZED),libasan,libasan8,$(SANITIZERS))
	@cd $(SANITIZED) && $(SANITIZER_ENV) PYTHONPATH=$(CURDIR)/$(SANITIZED) PMSTORE_CRASH_BUDGET=$${PMSTORE_CRASH_BUDGET:-24} \
		PMSTORE_FAULTS=4 PMSTORE_DAMAGE=100 \
		timeout 1500 $(CURDIR)/$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider \
		-m 'not slow and not long and not no_sanitizer' $(addprefix --ignore=,$(ESTIMATORS) $(WITHOUT_C) $(REACHED_BY_OTHERS)) $(ARGS)

# The tests marked long, which make test leaves out; the targets of the folders apart run theirs.
long: build
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=12 -m long $(APART:%=--ignore=%) $(ARGS)

# The background sync beside commits, checkpoints and growth, and all that several threads do with a store.
tsan: build
	$(call instrumented,$(RACES),libtsan,libtsan2,$(THREAD_SANITIZER))
	@cd $(RACES) && LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" TSAN_OPTIONS=halt_on_error=1:exitcode=66 \
		PYTHONPATH=$(CURDIR)/$(RACES) timeout 720 $(CURDIR)/$(BIN)/python -m pytest -q -p no:cacheprovider \
		-m 'not slow and not long and not no_sanitizer' -k 'not I14 and not D7_syncs' \
		$(call tests,core,async parallel_compare write_back) $(call tests,store,threads_fork) $(ARGS)

# Beside crashes: for longer, what make test runs for a short time only, which is random operations, races, damaged
# metadata, failing calls, and crashes of commits that are durable later; and all tests of C code under the sanitizers.
# A failure prints the seed and the event; PMSTORE_CRASH_SEED replays it.
torture: build
	@for seed in $(SEEDS); do echo "Seed $$seed"; PMSTORE_CRASH_SEED=$$seed PMSTORE_CRASH_BUDGET=$${PMSTORE_CRASH_BUDGET:-3000} \
		$(BIN)/python -m pytest -q -n $(JOBS) tests/core/test_crash.py $(ARGS) || exit 1; done
	@echo "Every failing call, and damage in every place"
	@PMSTORE_FAULTS=all PMSTORE_DAMAGE=all $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal \
		$(call tests,testing,testing_faults testing_damage) $(ARGS)
	@echo "Random operations and races, for longer"
	@PMSTORE_LONGER=$${PMSTORE_LONGER:-8} PMSTORE_CRASH_BUDGET=$${PMSTORE_CRASH_BUDGET:-2000} \
		PMSTORE_FAULTS=$${PMSTORE_FAULTS:-120} PMSTORE_KILLS=$${PMSTORE_KILLS:-250} \
		$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m longer $(ARGS)
	@echo "All that reaches C code, under the sanitizers"
	@$(MAKE) -s --no-print-directory sanitize REACHED_BY_OTHERS= ARGS=
	@echo "Kills"
	@$(BIN)/python -m tests.support.kills $${PMSTORE_KILLS:-2000}

# Without root, mounts or loop devices it says so. A failure prints the command that replays it (REPLAY=…).
power: build
	@$(BIN)/python -m tests.power --jobs $(JOBS) $(if $(CUTS),--cuts $(CUTS)) $(if $(SEED),--seed $(SEED)) $(if $(FS),--fs $(FS)) \
		$(if $(REPLAY),--replay '$(REPLAY)') $(ARGS)

# Without clang and libFuzzer it says so, and goes on without guidance by coverage. A failure prints the command that replays it.
fuzz:
	@$(PYTHON) fuzz/run.py --runs $(RUNS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# All of them are in one build, in build/mutants, and chosen at run time.
mutants: build
	@$(BIN)/python -m tests.mutants.score --jobs $(JOBS) $(ARGS)

# A sample of all small changes of the code. In one build, too, in build/mutants-lines.
mutants-lines: build
	@$(BIN)/python -m tests.mutants.lines --jobs $(JOBS) $(ARGS)

# Which tests reach which function, for mutants-lines; ARGS=tests/test_x.py adds those of one file to the others.
mutants-reach: build
	@$(BIN)/python -m tests.mutants.reach $(ARGS)

# $(call environment,FOLDER,REQUIREMENTS): shell text, under set -e, that makes one again after a change of pyproject.toml.
environment = if [ ! -e $(1)/.built ] || [ pyproject.toml -nt $(1)/.built ]; then \
		$(PYTHON) -m venv --clear $(1); \
		$(1)/bin/python $(INSTALL) $(2); \
		touch $(1)/.built; \
	fi;

# $(call extra,NAME): shell text, the requirements of an extra of pyproject.toml, without those of other extras.
extra = $$($(BIN)/python -c 'import importlib.metadata as m; \
	print(*[r.split(";")[0].strip() for r in m.requires("pmstore") if "\"$(1)\"" in r and not r.startswith("pmstore")])')

# $(call beside,FOLDER,EXTRA,REQUIREMENTS): the same with the packages of .venv and, beside them, those of an extra.
packages = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
beside = if [ ! -e $(1)/.built ] || [ pyproject.toml -nt $(1)/.built ]; then \
		set -- $(3) $(call extra,$(2)); echo "Installing $$* into $(1) …"; \
		$(PYTHON) -m venv --clear --without-pip $(1); \
		echo "import site; site.addsitedir('$$($(BIN)/python $(packages))')" >$$($(1)/bin/python $(packages))/beside.pth; \
		$(1)/bin/python $(INSTALL) "$$@"; \
		touch $(1)/.built; \
	fi;
# The newest torch that is built for CPUs only, as others take gigabytes. Where pip lists none, any.
TORCH = $$($(BIN)/python -m pip index versions torch --disable-pip-version-check 2>/dev/null | grep -o '[0-9.]*+cpu' | head -1 | sed 's/^/torch==/')

# make test has the newest one.
sklearn: build
	@set -e; for version in $(VERSIONS); do \
		echo "scikit-learn $$version"; \
		$(call environment,build/sklearn/$$version,"scikit-learn==$$version.*" msgpack cffi xxhash pytest pytest-xdist hypothesis) \
		build/sklearn/$$version/bin/python -m pytest -q -n $(JOBS) -p no:cacheprovider -p pytest_pmstore $(ESTIMATORS) $(ARGS); \
	done

# Each Python with the newest numpy, SciPy and scikit-learn that it can have. In copies, with environments of their own.
pythons:
	@set -e; for python in $(PYTHONS); do \
		if ! $$python -c '' 2>/dev/null; then echo "$$python: not here"; continue; fi; \
		echo "$$python"; copy=build/python/$${python##*/}; mkdir -p $$copy; \
		find $$copy -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +; \
		git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C $$copy; \
		$(MAKE) -C $$copy test PYTHON=$$python APART=tests/aarch64; \
	done

oldest: build
	@set -e; $(call environment,build/oldest,$$($(BIN)/python tests/support/oldest.py))
	@PYTHONPATH=$(CURDIR) build/oldest/bin/python -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider -p pytest_pmstore $(ARGS)

# Results are in build/bench/results. bench-docs puts those of a full run into benchmarks/ and the documents.
bench: $(BENCH)/.built
	@$(BENCH)/venv/bin/python benchmarks/run.py $(if $(QUICK),--quick) $(ARGS)

bench-docs: $(BENCH)/.built
	@$(BENCH)/venv/bin/python benchmarks/report.py --docs $(ARGS)

bench-filesystems: $(BENCH)/.built
	@$(BENCH)/venv/bin/python benchmarks/file_systems.py $(if $(QUICK),--quick) $(ARGS)

paper: $(BENCH)/.built
	@PYTHONPATH=benchmarks $(BENCH)/venv/bin/python -m paper $(if $(QUICK),--quick) $(ARGS)

paper-docs: $(BENCH)/.built
	@PYTHONPATH=benchmarks $(BENCH)/venv/bin/python -m paper.report --docs $(ARGS)

# A competitor that can't be installed here is left out; the benchmarks say so.
$(BENCH)/.built: pyproject.toml setup.py $(CORE) | check
	@mkdir -p $(BENCH)
	@if [ ! -e $@ ] || [ pyproject.toml -nt $@ ] || [ setup.py -nt $@ ]; then \
		echo "Installing pmstore and its competitors into $(BENCH)/venv …" && \
		$(PYTHON) -m venv $(BENCH)/venv && pip="$(BENCH)/venv/bin/python $(INSTALL)" && \
		{ $$pip -e '.[bench]' || { \
			echo "pmstore: not all of them could be installed; going on with those that can" >&2; \
			$$pip -e '.[sklearn]' setuptools || exit 1; \
			for name in h5py joblib lmdb matplotlib safetensors zarr ZODB; do $$pip $$name || true; done; }; }; \
	else \
		echo "Compiling csrc …" && \
		$(BENCH)/venv/bin/python setup.py -q build_ext --inplace; \
	fi
	@touch $@

# As .ci/release says: needs a clean commit.
release:
	@ARGS='$(ARGS)' .ci/release

wheel: build
	@$(BIN)/python $(INSTALL) build
	@$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info pmstore/*.so pmstore/testing/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
