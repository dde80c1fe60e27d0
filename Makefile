# make demo    the whole chain on 1,797 real digits and a bag of broken files, in ./demo-work
# make test    the tests, without drills
# make test-fast   those that start no other process: no server, Spark, rank or command
# make test-current   with Python 3.13 and the newest of everything: the tests of what other projects release, a chain of each kind
# make drill   the drills: slow tests of real faults, servers and clusters
# make test-all    all tests and drills, with whole products and many trials: an hour or two
# make test-for FILE...   the tests that can see these files, cheapest first, with their time; LIMIT=60 for a minute of them
# make mutants   changes the modules that hold promises, and fails for a change that no test of theirs sees
# make check   formatting, lint, types, documentation, tests; .ci/run adds test-current and the drills
# make docs    the documentation site, in ./site; a link that leads nowhere fails it
# make release   sdist, wheels, SBOM and SHA-256 of them in dist/, built twice with the same bytes
# make bundle  dist/shardmill.zip, our code for `spark-submit --py-files`
# Each does all its set-up itself; a second call takes none. PYTHON=3.13 behind one that uses an environment takes the
# newest of everything, in .venv-3.13, without Horovod and Petastorm (docs/get-started/install.md).
.PHONY: demo test test-fast test-current test-for mutants drill test-all check setup lint docs release bundle clean
SHELL := /bin/bash
# Of the command line alone, not the environment.
PYTHON :=
VENV = .venv$(PYTHON:%=-%)
RUN = source $(VENV)/shardmill.env && PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PYTEST := pytest --dist loadscope --no-loadscope-reorder

demo:
	@scripts/setup.sh demo $(PYTHON)
	@$(RUN) python -m pipeline.demo
	@$(RUN) shardmill run examples/demo.toml --workdir demo-work

setup:
	@scripts/setup.sh all $(PYTHON)

test: setup
	@$(RUN) $(PYTEST) -n 2 --tier test

test-fast: setup
	@$(RUN) $(PYTEST) -n 2 --tier fast

test-current: PYTHON := 3.13
test-current: setup
	@$(RUN) $(PYTEST) -n 2 --tier current

# What follows `test-for` is files, and nothing to make.
ifeq ($(firstword $(MAKECMDGOALS)),test-for)
FILES := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
.PHONY: $(FILES)
$(FILES): ; @:
endif

test-for: setup
	@$(RUN) python scripts/test_for.py $(if $(LIMIT),--limit $(LIMIT)) $(FILES)

mutants: setup
	@$(RUN) python scripts/mutate.py

# Drills wait for servers half of their time.
drill: setup
	@$(RUN) $(PYTEST) -n 3 --tier drill

test-all: setup
	@$(RUN) SHARDMILL_FULL=1 $(PYTEST) -n 3 --tier all

lint: setup
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) pyright
	@$(RUN) pyright -p tests/pyrightconfig.json

# Not `--quiet`: it drops the warnings that `strict` counts, and nothing would fail.
docs: setup
	@$(RUN) NO_MKDOCS_2_WARNING=1 mkdocs build
	@echo "site/index.html"

check: lint docs test

release:
	@uv=$$(scripts/setup.sh release) && "$$uv" run --quiet --no-project --python 3.11 scripts/release.py dist

bundle:
	@python3 scripts/bundle.py dist/shardmill.zip

clean:
	rm -rf demo-work shardmill-work dist site .pytest_cache .ruff_cache .hypothesis spark-warehouse artifacts metastore_db derby.log
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
