# Everything runs in .venv, which the first target installs.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-slow test-oldest sanitize sanitize-threads lint format docs figures screenshots clean

install: $(INSTALLED)

# Installing compiles the kernels, so a changed kernel source reinstalls.
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

# The oldest supported torch and timm, in a separate environment (gigabytes, minutes). The package is installed as a user
# installs it and tested from a folder where Python does not find the checkout.
OLDEST := build/oldest
OLDEST_PIP = $(OLDEST)/bin/pip install --quiet --constraint constraints-oldest.txt
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) torch timm pytest hypothesis
	$(OLDEST_PIP) --force-reinstall --no-deps .
	cd tests/oldest && PPMA_OLDEST=1 ../../$(OLDEST)/bin/python -m pytest test_oldest.py

# Kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer. Leak detection is off: Python itself leaks at exit.
# libstdc++ is preloaded because the sanitizer needs its exception functions. Without expensive optimisations GCC fuses no
# multiply-adds, and the error bounds for AVX2 do not hold.
SANITIZED := build/sanitize/lib/ppma/ops/backends/native
PRELOADED = $$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)
KERNEL_TESTS := $(wildcard tests/ops/test_native_*.py) tests/ops/test_empty.py tests/ops/test_default_dtype.py \
	tests/ops/test_large_logits.py tests/ops/test_padding.py tests/layers/test_fused.py
sanitize: $(INSTALLED)
	PPMA_NATIVE_FLAGS="-O1 -fexpensive-optimizations -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python setup.py --quiet build_ext --build-lib build/sanitize/lib --build-temp build/sanitize
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 PPMA_NATIVE_DIR="$(CURDIR)/$(SANITIZED)" \
		$(BIN)/python -m pytest -n 2 $(KERNEL_TESTS)

# Kernel tests on three threads under ThreadSanitizer, with C++ threads instead of OpenMP's, whose barriers it does not
# understand (docs/contributing/index.md). `setarch -R` disables address randomisation for it. Tests that fork, count
# memory or need OpenMP are left out.
RACES := build/sanitize-threads/lib/ppma/ops/backends/native
sanitize-threads: $(INSTALLED)
	PPMA_NATIVE_FLAGS="-O1 -fexpensive-optimizations -g -fsanitize=thread -DPPMA_OWN_THREADS" \
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

# The figures of the documentation, from the weights in the package; `cost` measures for minutes.
IMAGES := docs/images
FIGURE = $(BIN)/ppma figure
figures: $(INSTALLED)
	$(FIGURE) masks --out $(IMAGES)/masks.png
	for name in scans matrices paths paths-3d pairs; do $(FIGURE) $$name --out $(IMAGES)/$$name.svg || exit 1; done
	$(FIGURE) cost --largest 128 --no-memory --out $(IMAGES)/cost.svg
	for file in attention.svg query.gif; do $(FIGURE) attention --image rocket --out $(IMAGES)/$$file || exit 1; done
	$(FIGURE) heads --image rocket --out $(IMAGES)/heads.svg
	$(FIGURE) segmentation --out $(IMAGES)/photograph.png
	$(FIGURE) receptive-field --out $(IMAGES)/receptive-field.svg

# The explorer in Chromium (apt-get install chromium), desktop and phone.
screenshots: $(INSTALLED)
	$(BIN)/ppma explore --static build/explorer.html
	PYTHONPATH=tests/explore $(BIN)/python tools/screenshots.py build/explorer.html $(IMAGES)

clean:
	rm -rf .venv build dist src/*.egg-info
