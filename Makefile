# Everything a person types. Set-up runs once, and again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: help setup demo test check faults bench bench-classifier bench-memory bench-parallel bench-evaluation bench-data bench-peers bench-collection pictures clean

help:
	@echo "make setup   create $(VENV) and install"
	@echo "make demo    pretrain on 1,797 digits and score the encoder (about 2 minutes)"
	@echo "make test    the tests"
	@echo "make check   format, lint, types, tests"
	@echo "make faults  kill, damage and starve small runs, and see what becomes of them"
	@echo "make bench   measure the digits preset again; bench-classifier, bench-memory, ... measure the rest"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/millionway demo

# MARK="" runs the slow tests too.
MARK ?= not slow and not long and not browser
test: $(READY)
	$(BIN)/python -m pytest -m "$(MARK)"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --warnings
	$(MAKE) test

# SHORT=--short takes a few of each, and writes nothing down.
faults: $(READY)
	$(BIN)/python benchmarks/faults/run.py $(SHORT)

bench: $(READY)
	$(BIN)/python benchmarks/presets.py digits

bench-classifier: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/classifier.py steps --instances 131072 1281167
	$(BIN)/python benchmarks/classifier.py hardest --instances 131072

bench-memory: $(READY)
	$(BIN)/python benchmarks/max_classes.py search --limit-gib 1.5
	$(BIN)/python benchmarks/max_classes.py step --instances 14200000 --smoothed
	$(BIN)/python benchmarks/max_classes.py step --instances 30000000 --storage bfloat16

bench-parallel: $(READY)
	$(BIN)/python benchmarks/parallel.py steps --ranks 2 --instances 131072
	$(BIN)/python benchmarks/parallel.py steps --ranks 4 --instances 131072
	$(BIN)/python benchmarks/parallel.py steps --ranks 2 --instances 1281167
	$(BIN)/python benchmarks/parallel.py alone --instances 131072
	$(BIN)/python benchmarks/parallel.py largest --ranks 2
	$(if $(CIFAR10),$(BIN)/python benchmarks/two_ranks.py --data $(CIFAR10)/train)

bench-evaluation: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/evaluation.py $(if $(CIFAR10),--cifar10 $(CIFAR10))

# CIFAR10 and PHOTOS name folders of images.
bench-data: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/data.py --cifar10 $(CIFAR10) --photos $(PHOTOS)

# Hours on one thread; what is finished is kept, so it may be stopped and started again.
bench-peers: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/candidates.py run --data $(CIFAR10)/train --test-data $(CIFAR10)/test
	$(BIN)/python benchmarks/peers.py cost --data $(CIFAR10)/train
	$(BIN)/python benchmarks/peers.py tune --data $(CIFAR10)/train --test-data $(CIFAR10)/test
	$(BIN)/python benchmarks/peers.py run --data $(CIFAR10)/train --test-data $(CIFAR10)/test
	$(BIN)/python benchmarks/peers.py tables

# CIFAR10 names a folder with train/ and test/; RUN a run on the images DATA that benchmarks/planted.py makes of it. The
# page is opened in chromium.
bench-collection: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/collection.py planted --run $(RUN) --data $(DATA)
	$(BIN)/python benchmarks/collection.py neighbors --images 374951
	$(BIN)/python benchmarks/collection.py places --images 50000
	$(BIN)/python benchmarks/collection.py table
	$(BIN)/python benchmarks/pixel_outliers.py --cifar10 $(CIFAR10)
	$(BIN)/python benchmarks/page.py --cifar10 $(CIFAR10)

# The pictures in docs/, of the run RUN on the images DATA; OTHER are images that it has not seen. The page is looked at by
# chromium and chromedriver.
pictures: $(READY)
	$(BIN)/python benchmarks/first_picture.py --run $(RUN) --data $(OTHER)
	$(BIN)/python benchmarks/pictures.py --run $(RUN) --data $(DATA) --out $(RUN)/../collection.parquet

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
