# make demo   both flows on real sequences, with a worker that is killed: no GPU, no server to start; half a minute
# make test   the tests, under 10 minutes on two cores
# make e2e    the minutes-long tests: real Prefect on PostgreSQL, Prometheus, Chromium; make e2e-long: rare faults, all data
# make e2e-newest   what touches Prefect's server, worker and page, with the newest Prefect; minutes
# make clusters   Ray and Dask on two nodes of this machine, 20,000 proteins: killed, late, again and again; an hour or more
# make soak   every fault many times over, under 30 minutes; the table goes to docs/reliability.md
# make soak-calls   400 system calls of predict and embed fail, one in each run; a quarter of an hour; a table there, too
# make lint   ruff, mypy --strict, import directions, the site of the documentation
# make docs   the site: build/site; make picture: the README's two pictures, by Chromium
# make wheel-check   the wheel without extras in a fresh environment: predict, embed, a deployment; about four minutes
# make bench  the benchmarks, under 15 minutes; results, table and plot go to benchmarks/results/
# make bench-large   those of larger models, of blocks, workers and threads, of 20 Mb of contigs, and of scale
#     (docs/scale.md); over an hour
# make gpu-check PART=a   the checks that need a GPU, parts a to e, each under 10 minutes, with any Python that has torch
#                  2.10 or later; SECTIONS="rates esm2_650m" runs these alone
# make gpu-kit     build/gpu_kit: wheels of what a bare machine with CUDA lacks for gpu-check; prints size and commands
# make gpu-kit-check   gpu-check over tiny shapes in an environment like that machine's, with the kit; about four minutes
# make gpu-check-file   the same as one file for a rented machine: build/gpu_check.pyz (docs/gpu_check.md)
# make gpu-mutants   changes lines that only a GPU runs, one at a time, and shows that a test notices each; minutes
# make venv   only set up .venv

PYTHON ?= python3
PY := .venv/bin/python
PLAIN := .venv/.ready-plain
READY := .venv/.ready
PIPELINES := .venv-pipelines/.ready
NEWEST_PY := .venv-prefect/bin/python
NEWEST := .venv-prefect/.ready
DEMO := .demo

export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: venv demo test e2e e2e-long e2e-newest clusters soak soak-calls lint docs picture format wheel-check bench bench-large gpu-check gpu-kit gpu-kit-check gpu-check-file gpu-mutants clean

venv: $(READY)

# A user's environment without extras, for the demo. READY adds what tests and lint need.
$(PLAIN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable .
	@touch $(PLAIN)

$(READY): $(PLAIN)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

# What people call VirNucPro from: Snakemake and MultiQC, which pin other versions of what we use.
$(PIPELINES): packaging/test-requirements.txt
	$(PYTHON) -m venv .venv-pipelines
	.venv-pipelines/bin/python -m pip install --quiet --no-deps --requirement packaging/test-requirements.txt
	@touch $(PIPELINES)

# .venv has Prefect's lowest version that we work with. This has the newest one and looks for all else in .venv.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(NEWEST): packaging/newest-requirements.txt $(READY)
	$(PY) -m venv --clear --without-pip .venv-prefect
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(NEWEST_PY) $(PURELIB))/venv.pth"
	$(PY) -m pip --python $(NEWEST_PY) install --quiet --no-deps --requirement packaging/newest-requirements.txt
	$(PY) -m pip --python $(NEWEST_PY) check
	@touch $(NEWEST)

# A Prefect home of its own: the demo does not touch the user's server, profile or database.
PRIVATE_PREFECT := env -u PREFECT_API_URL -u PREFECT_API_KEY -u PREFECT_PROFILE PREFECT_HOME="$(CURDIR)/$(DEMO)/prefect"

demo: $(PLAIN)
	@rm -rf $(DEMO)/out; mkdir -p $(DEMO)/out $(DEMO)/prefect
	@$(PRIVATE_PREFECT) $(PY) -m tools.demo $(DEMO)/out

# Two files of tests at a time, each process with one thread: the tests mostly wait for processes that they started.
test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not slow and not soak' --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		--durations 12

# Tests that measure memory run alone; the others two files at a time; -rP shows what they measured.
MEMORY_TESTS := tests/e2e/test_bounded_memory.py tests/e2e/test_bounded_memory_of_predictions.py
e2e: $(READY) $(PIPELINES)
	$(PY) -m pytest -s -m slow $(MEMORY_TESTS)
	OMP_NUM_THREADS=1 $(PY) -m pytest -rfEP -m 'slow and not long and not soak' --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder --durations 12 $(addprefix --deselect ,$(MEMORY_TESTS))

NEWEST_TESTS := tests/e2e/test_prefect_behaviour.py tests/e2e/test_prefect_form.py \
	$(addprefix tests/e2e/test_prefect_service.py::,\
		test_deploying_everything_twice_changes_nothing_the_second_time \
		test_ci_gets_the_outcome_of_a_run_as_exit_code_with_its_lines_and_its_summary)
e2e-newest: $(NEWEST)
	OMP_NUM_THREADS=1 $(NEWEST_PY) -m pytest -rfEP -m 'slow and not long' --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder --durations 12 $(NEWEST_TESTS)

e2e-long: $(READY) $(NEWEST)
	$(PY) -m pytest -s -m 'slow and long'

clusters: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -rfEP -m slow tests/e2e/test_clusters.py tests/e2e/test_two_nodes.py \
		--cluster-proteins 20000

soak: $(READY)
	$(PY) -m pytest -s -m soak tests/faults --ignore tests/faults/test_failing_calls.py --soak-table docs/reliability.md

soak-calls: $(READY)
	$(PY) -m pytest -s -m soak tests/faults/test_failing_calls.py --numprocesses 2 --dist load \
		--soak-table docs/reliability.md --soak-name "failing calls"

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	$(MAKE) docs

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

picture: $(READY) demo
	$(PY) -m tests.flow_picture
	chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,860 --virtual-time-budget=5000 \
		--screenshot=docs/images/report.png "file://$(CURDIR)/$(DEMO)/out/predict/report.html"

wheel-check:
	PYTHON="$(PYTHON)" .ci/wheel-check

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

BENCH_READY := .venv/.ready-bench

$(BENCH_READY): $(READY)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	@touch $(BENCH_READY)

bench: $(BENCH_READY)
	$(PY) benchmarks/embedding.py --rounds 2 --write embedding
	$(PY) benchmarks/scaling.py --models 8M --only workers --rounds 1 --write
	$(PY) benchmarks/index.py --rounds 3 --write
	$(PY) benchmarks/hdf5_writing.py --write
	$(PY) benchmarks/embedding_cache.py --write
	$(PY) benchmarks/fragments.py --write
	$(PY) benchmarks/classification.py --write
	$(PY) benchmarks/end_to_end.py --embedded-megabases 1 --write end_to_end
	$(PY) benchmarks/end_to_end.py --page
	$(PY) benchmarks/report.py

bench-large: $(BENCH_READY)
	$(PY) benchmarks/embedding.py --rows 150M:chunks,650M:chunks --write embedding_large
	$(PY) benchmarks/scaling.py --write
	$(PY) benchmarks/sharded_output.py --write
	$(PY) benchmarks/scale_rates.py --write
	$(PY) benchmarks/scale_page.py
	$(PY) benchmarks/end_to_end.py --megabases 1 5 20 --rounds 3 --write end_to_end_large
	$(PY) benchmarks/end_to_end.py --page
	$(PY) benchmarks/report.py

# Not $(READY): a machine with a GPU often has its own torch, and no registry to install from.
gpu-check:
	$(or $(wildcard $(PY)),$(PYTHON)) benchmarks/gpu_check.py $(if $(PART),--part $(PART)) $(if $(SECTIONS),--only $(SECTIONS))

GPU_KIT_PYTHON ?= 3.12
gpu-kit: $(PLAIN)
	$(PY) -m tools.gpu_kit build/gpu_kit --python $(GPU_KIT_PYTHON)

# A machine with CUDA's Python has torch, numpy, safetensors and tokenizers, and nothing of ours.
BARE := build/bare/bin/python
gpu-kit-check: $(PLAIN)
	rm -rf build/bare build/gpu_kit_here build/gpu_kit_check; $(PYTHON) -m venv build/bare
	$(BARE) -m pip install --quiet --constraint constraints.txt torch numpy safetensors tokenizers
	$(PY) -m tools.gpu_kit build/gpu_kit_here --python $$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	for part in a b c d e; do $(BARE) benchmarks/gpu_check.py --device cpu --tiny --part $$part \
		--kit build/gpu_kit_here --out build/gpu_kit_check || exit 1; done
	$(BARE) -m pip uninstall --quiet --yes safetensors tokenizers
	$(PY) -m tools.gpu_check_file build/gpu_kit_check/gpu_check.pyz
	cd build/gpu_kit_check && ../../$(BARE) gpu_check.pyz --device cpu --tiny

gpu-check-file:
	$(or $(wildcard $(PY)),$(PYTHON)) -m tools.gpu_check_file

gpu-mutants: $(READY)
	$(PY) -m tests.gpu_mutants

clean:
	rm -rf .venv .venv-pipelines .venv-prefect $(DEMO) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
