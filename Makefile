# The two commands of the README. Both create .venv and install everything they need into it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= runs/quickstart
# Versions this release was tested with; the package itself only states lower bounds.
PINS   := -c constraints.txt

.PHONY: quickstart test test-slow test-sandbox-user lint format install

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

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run --Werror

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc \( -name '*.h' -o -name '*.cc' -o -name '*.inc' \) -print0 | xargs -0 $(BIN)/clang-format -i

# Editable, so that tests run against the tree; the extension is rebuilt by this command.
install: $(VENV)
	$(BIN)/pip install --quiet $(PINS) -e '.[test]'

$(VENV):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
