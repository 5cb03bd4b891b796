# How libcolibri, host/ and their test and bench programs are built. Included by the top Makefile.
# The source list is a rule, the same one CMakeLists.txt has:
#   engine   src/*/*.c and src/kernels/*/*.c        host   host/*.c        a program per file of bench/ and tests
# Flags of an instruction set are the text of src/kernels/<isa>/isa.flags, added for that folder on x86-64 only.

CC      ?= cc
ifeq ($(origin CC),default)
CC      := $(if $(shell command -v gcc),gcc,cc)
endif
AR      ?= ar
NM      ?= nm
OBJCOPY ?= objcopy
VARIANT ?= release
BUILD   ?= build
WERROR  ?= -Werror
B       := $(BUILD)/$(VARIANT)
E       := engine_c
SOVERSION := 1

# SKIP='engine_c/src/ops/% …' leaves files out while they do not compile; programs that do not need them still link.
SKIP       ?=
ENGINE_SRC := $(filter-out $(SKIP),$(sort $(wildcard $(E)/src/*/*.c $(E)/src/kernels/*/*.c)))
HOST_SRC   := $(sort $(wildcard $(E)/host/*.c))
TEST_SRC   := $(sort $(wildcard tests/unit/engine/test_*.c))
BENCH_SRC  := $(sort $(wildcard $(E)/bench/*.c))
ENGINE_OBJ := $(ENGINE_SRC:%.c=$(B)/%.o)
HOST_OBJ   := $(HOST_SRC:%.c=$(B)/%.o)
TEST_BIN   := $(TEST_SRC:tests/unit/engine/%.c=$(B)/tests/%)
BENCH_BIN  := $(BENCH_SRC:$(E)/bench/%.c=$(B)/bench/%)

# What the compiler is and builds for.
IS_CLANG := $(findstring clang,$(shell $(CC) --version 2>/dev/null | head -n 1))
TARGET   := $(shell $(CC) -dumpmachine 2>/dev/null)

# One line per variant: optimisation and instrumentation. Only release uses LTO; profile keeps frames for perf.
LTO_COMPILE := $(if $(IS_CLANG),-flto,-flto=auto)
LTO_LINK    := $(if $(IS_CLANG),-flto -fuse-ld=lld,-flto=auto)
OPT_release := -O3 $(LTO_COMPILE)
OPT_nolto   := -O3
OPT_O0      := -O0
OPT_profile := -O3 -g -fno-omit-frame-pointer
OPT_debug   := -Og -g
OPT_asan    := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
OPT_tsan    := -O1 -g -fno-omit-frame-pointer -fsanitize=thread
OPT_fuzz    := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all
OPT_emu512  := -O1 -DCLB_EMULATE_AVX512 -Wno-psabi
LINK_release := -O3 $(LTO_LINK)
LINK_asan    := -fsanitize=address,undefined
LINK_tsan    := -fsanitize=thread
RELOC_release := $(if $(IS_CLANG),,-flinker-output=nolto-rel)
ifndef OPT_$(VARIANT)
$(error unknown VARIANT "$(VARIANT)": release nolto O0 profile debug asan tsan fuzz emu512)
endif

# No fast-math, no contraction, no errno: the numerics contract. No stack protector and no fortify: the library may
# refer to nothing but mem* (distributions switch both on by default).
COMMON_FLAGS := -std=c11 -ffp-contract=off -fno-math-errno -fvisibility=hidden -fPIC -Wall -Wextra $(WERROR) \
    -ffunction-sections -fdata-sections -fno-stack-protector -U_FORTIFY_SOURCE
INCLUDES     := -I$(E)/include -I$(E)/src -I$(E)
# host/ and programs are ordinary POSIX code; only the engine is free of the C library.
PROGRAM_FLAGS := -D_GNU_SOURCE -pthread
EXTRA_CFLAGS ?=
EXTRA_LDFLAGS ?=

# $(call isa_flags,file): the folder's isa.flags. Emulated AVX-512 is compiled as AVX2.
isa_file  = $(dir $1)$(if $(and $(filter emu512,$(VARIANT)),$(findstring /avx512/,$1)),../avx2/)isa.flags
isa_flags = $(if $(filter x86_64%,$(TARGET)),$(file <$(call isa_file,$1)))
# $(call flags_of,file): everything the compiler is given for one source file
flags_of  = $(strip $(COMMON_FLAGS) $(OPT_$(VARIANT)) $(INCLUDES) \
    $(if $(findstring $(E)/src/,$1),$(call isa_flags,$1),$(PROGRAM_FLAGS) -Itests/unit/engine) $(EXTRA_CFLAGS))

LIB_SO := $(B)/libcolibri.so.$(SOVERSION)
LIB_A  := $(B)/libcolibri.a
# The whole engine as one relocatable object, internals still visible: what tests and bench programs link with.
ENGINE_O := $(B)/engine.o

# Everything is rebuilt when the compiler or its flags change, and relinked when a source file comes or goes.
$(shell mkdir -p $(B))
stamp = $(if $(call differs,$(file <$1),$2),$(file >$1,$2))
differs = $(subst x$(strip $1),,x$(strip $2))$(subst x$(strip $2),,x$(strip $1))
$(call stamp,$(B)/flags.stamp,$(CC) $(TARGET) $(filter-out -Werror,$(COMMON_FLAGS)) $(OPT_$(VARIANT)) $(EXTRA_CFLAGS))
$(call stamp,$(B)/sources.stamp,$(ENGINE_SRC) $(HOST_SRC))

# Products appear by rename, so that several makes in one folder (pip, pytest, an editor) never see half a file.
temporary = $@.$$$$
done      = mv -f $(temporary) $@

$(B)/%.o: %.c $(B)/flags.stamp
	@mkdir -p $(@D)
	$(Q)$(CC) $(call flags_of,$<) -MMD -MP -MF $(@:.o=.d) -MT $@ -c $< -o $(temporary) && $(done)

define isa_dependency
$(patsubst %.c,$(B)/%.o,$(wildcard $(1)*.c)): $(1)isa.flags
endef
$(foreach f,$(wildcard $(E)/src/kernels/*/isa.flags),$(eval $(call isa_dependency,$(dir $f))))

$(ENGINE_O): $(ENGINE_OBJ) $(B)/sources.stamp
	$(Q)$(CC) -r -nostdlib $(LINK_$(VARIANT)) $(RELOC_$(VARIANT)) -ffunction-sections -fdata-sections \
	    -o $(temporary) $(ENGINE_OBJ) && $(done)

# -nostartfiles: a library without constructors needs no crt files, and so refers to nothing but mem*.
$(LIB_SO): $(ENGINE_OBJ) $(E)/colibri.map $(B)/sources.stamp
	$(Q)$(CC) -shared -nostartfiles $(LINK_$(VARIANT)) -Wl,-soname,$(@F) -Wl,--version-script=$(E)/colibri.map \
	    -Wl,--gc-sections $(if $(filter asan tsan,$(VARIANT)),,-Wl,-z,defs) -o $(temporary) \
	    $(ENGINE_OBJ) && $(done)
	$(Q)ln -sf $(@F) $(B)/libcolibri.so

# The archive holds one object whose hidden symbols are made local, so it too defines nothing but colibri_*.
$(LIB_A): $(ENGINE_O)
	$(Q)mkdir -p $(temporary) && $(OBJCOPY) --localize-hidden $< $(temporary)/colibri.o && \
	    $(AR) rcsD $(temporary)/$(@F) $(temporary)/colibri.o && mv -f $(temporary)/$(@F) $@ && rm -r $(temporary)

$(TEST_BIN): $(B)/tests/%: $(B)/tests/unit/engine/%.o $(ENGINE_O) $(HOST_OBJ)
	@mkdir -p $(@D)
	$(Q)$(CC) $(LINK_$(VARIANT)) -pthread -Wl,--gc-sections $^ -lm $(EXTRA_LDFLAGS) -o $(temporary) && $(done)
$(BENCH_BIN): $(B)/bench/%: $(B)/$(E)/bench/%.o $(ENGINE_O) $(HOST_OBJ)
	@mkdir -p $(@D)
	$(Q)$(CC) $(LINK_$(VARIANT)) -pthread -Wl,--gc-sections $^ -lm $(EXTRA_LDFLAGS) -o $(temporary) && $(done)

.SECONDARY:
.DELETE_ON_ERROR:
-include $(wildcard $(ENGINE_OBJ:.o=.d) $(HOST_OBJ:.o=.d) $(B)/tests/unit/engine/*.d $(B)/$(E)/bench/*.d)
