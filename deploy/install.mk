# What make wheel, man, install and uninstall do; the top Makefile lists them. install.sh says what goes where.
PREFIX     ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR    ?=
WHEELS     := $(BUILD)/wheels
GATEWAY    ?= $(BUILD)/colibri-gateway
INSTALLER   = DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' SYSCONFDIR='$(SYSCONFDIR)' WHEELS='$(abspath $(WHEELS))' \
    PYTHON='$(abspath $(PY))' GATEWAY='$(abspath $(GATEWAY))' deploy/install.sh

# setuptools keeps what it has built; a module that is gone must not come back.
WHEEL_SRC := $(PY_SRC) LICENSE \
    $(shell find $(E)/python daemon client/python -name '*.py' -o -name '*.json' -o -name '*.def')
$(WHEELS)/stamp: $(LIB_SO) $(WHEEL_SRC) | $(VENV)/tools.stamp
	rm -rf build/python/lib* build/python/bdist* $(WHEELS)
	$(PY) -m pip wheel --quiet --no-build-isolation --wheel-dir $(WHEELS) '.[demo]'
	@touch $@

$(BUILD)/man/stamp: $(VENV)/engine.stamp deploy/man.py $(WHEEL_SRC)
	@mkdir -p $(@D)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) deploy/man.py $(@D) colibrid colibri-client colibri-bench \
	    $(wildcard $(GATEWAY))
	@touch $@
