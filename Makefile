# Everything runs in .venv; `make demo` and `make test` install what they need on the first call.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-slow test-oldest sanitize sanitize-threads lint format docs clean

install: $(INSTALLED)

# The kernels are compiled by the installation, so a changed source installs again (which takes seconds by then).
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/ppma/ops/backends/native/csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[all]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/ppma demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# The oldest torch and timm that pyproject.toml claims, in an environment of their own (gigabytes, minutes). The package is
# installed as a user would install it, and is tested from a folder where Python does not find the checkout.
OLDEST := build/oldest
OLDEST_PIP = $(OLDEST)/bin/pip install --quiet --constraint constraints-oldest.txt
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) torch timm pytest hypothesis
	$(OLDEST_PIP) --force-reinstall --no-deps .
	cd tests/oldest && PPMA_OLDEST=1 ../../$(OLDEST)/bin/python -m pytest test_oldest.py

# The native kernels' tests with a library that checks every access and every undefined operation. Leaks are not looked
# for: Python itself has many at exit. The C++ library is preloaded as well, or the sanitizer misses how to throw.
SANITIZED := build/sanitize/lib/ppma/ops/backends/native
PRELOADED = $$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)
KERNEL_TESTS := $(wildcard tests/ops/test_native_*.py) tests/ops/test_empty.py tests/ops/test_default_dtype.py \
	tests/ops/test_large_logits.py
sanitize: $(INSTALLED)
	PPMA_NATIVE_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python setup.py --quiet build_ext --build-lib build/sanitize/lib --build-temp build/sanitize
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 PPMA_NATIVE_DIR="$(CURDIR)/$(SANITIZED)" \
		$(BIN)/python -m pytest -n 2 $(KERNEL_TESTS)

# The same tests on three threads with a library that looks for data races. Its threads are C++ threads instead of
# OpenMP's, whose barriers ThreadSanitizer does not know (docs/contributing/index.md). `setarch -R` keeps addresses where
# the sanitizer expects them. What is left out forks, counts memory, or asks for OpenMP itself.
RACES := build/sanitize-threads/lib/ppma/ops/backends/native
sanitize-threads: $(INSTALLED)
	PPMA_NATIVE_FLAGS="-O1 -g -fsanitize=thread -DPPMA_OWN_THREADS" \
		$(BIN)/python setup.py --quiet build_ext --build-lib build/sanitize-threads/lib --build-temp build/sanitize-threads
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libtsan.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1 \
		OMP_NUM_THREADS=3 PPMA_NATIVE_DIR="$(CURDIR)/$(RACES)" \
		setarch -R $(BIN)/python -m pytest -n 0 -k "not fork and not memory and not openmp" $(KERNEL_TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist src/*.egg-info
