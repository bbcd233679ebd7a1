# The two commands of the README. Both create .venv and install everything they need into it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= runs/quickstart
# Versions this release was tested with; the package itself only states lower bounds.
PINS   := -c constraints.txt

.PHONY: quickstart test test-slow test-sandbox-user sanitize trapped build-tools lint format install

quickstart: $(VENV)
	$(BIN)/pip install --quiet $(PINS) '.[gguf]'
	$(BIN)/hetero rl recipes/quickstart.yaml --out $(OUT)

test: install lint
	$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider

test-slow: install
	$(BIN)/python -m pytest -m slow -p no:cacheprovider

# As root, the tests of sandboxes show one half; this is the other. The checkout and the interpreter must be
# readable by others.
TEST_USER ?= 1500
test-sandbox-user: install
	setpriv --reuid=$(TEST_USER) --regid=$(TEST_USER) --clear-groups sh -c 'HOME=$$(mktemp -d) \
	  exec $(BIN)/python -m pytest -m "not slow" -p no:cacheprovider tests/sandbox'

# What builds the extension outside of pip.
build-tools: install
	$(BIN)/pip install --quiet cmake ninja nanobind

# Memory errors, undefined behaviour and data races; takes half an hour. The pool runs by itself under
# ThreadSanitizer; all kernels, formats and operations run random shapes under the other two, but for the tests
# of memory, which would measure the sanitizer's.
CMAKE     := PATH=$(abspath $(BIN)):$$PATH cmake -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python -S .
SANITIZED := $(CMAKE) -DCMAKE_BUILD_TYPE=RelWithDebInfo
PRELOAD    = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so) \
             $(shell $(CXX) -print-file-name=libstdc++.so)

sanitize: build-tools
	$(SANITIZED) -B build/sanitize/tsan -DHETERO_SANITIZE=thread
	$(BIN)/ninja -C build/sanitize/tsan test_thread_pool
	TSAN_OPTIONS=die_after_fork=0:halt_on_error=1 build/sanitize/tsan/test_thread_pool
	$(SANITIZED) -B build/sanitize/asan -DHETERO_SANITIZE=address,undefined
	$(BIN)/ninja -C build/sanitize/asan _C
	LD_PRELOAD="$(PRELOAD)" ASAN_OPTIONS=detect_leaks=0 HETERO_FUZZ_ROUNDS=8 $(BIN)/python \
	  tests/cpp/with_extension.py build/sanitize/asan/_C.*.so -m "not slow" \
	  -k "not adds_activations and not give_their_memory_back" tests/kernels tests/experts

# The kernels for AMX and AVX512-BF16, instruction by instruction as they are compiled, on a processor that has
# AVX-512 and neither of them; takes some minutes (tests/cpp/trapped.cc).
trapped: build-tools
	$(CMAKE) -B build/trapped -DHETERO_TRAPPED=ON
	$(BIN)/ninja -C build/trapped _C
	$(BIN)/python tests/cpp/with_extension.py build/trapped/_C.*.so -m "not slow" \
	  -k "(amx or avx512bf16) and not emulated and not environment" tests/kernels tests/experts tests/parity/test_exact_property.py

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc tests/cpp \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run --Werror

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests/cpp \( -name '*.h' -o -name '*.cc' -o -name '*.inc' \) -print0 | xargs -0 $(BIN)/clang-format -i

# Editable, so that tests run against the tree; the extension is rebuilt by this command.
install: $(VENV)
	$(BIN)/pip install --quiet $(PINS) -e '.[test]'

$(VENV):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
