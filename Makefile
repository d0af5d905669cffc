# The daily commands. VENV=... names another environment, ARGS=... goes to the command.
VENV ?= .venv
ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help install quickstart search ui check format quick test docs docs-live clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 14

install: ## the environment, with all that tests need
	bash -c 'source scripts/install.sh && install test,train,data,lm-eval,bayes'

quickstart: ## a whole search on this machine, set-up included
	bash scripts/quickstart.sh $(ARGS)

search: ## a search; ARGS="task=nlgraph_mini name=first"
	$(VENV)/bin/python -m swarm.search $(ARGS)

ui: ## the web page at http://127.0.0.1:8080
	$(VENV)/bin/python -m swarm.ui $(ARGS)

check: ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: ## what ruff can put right
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

quick: ## the tests without the slow ones
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

test: ## all checks and tests, as before a change lands
	bash scripts/test.sh $(ARGS)

docs: ## the site into build/site; fails at a dead link
	$(VENV)/bin/python scripts/site_pages.py
	$(VENV)/bin/zensical build --strict --clean -f mkdocs.yml

docs-live: ## the site at http://127.0.0.1:8001; python scripts/site_pages.py shows later changes
	$(VENV)/bin/python scripts/site_pages.py
	$(VENV)/bin/zensical serve -f mkdocs.yml --dev-addr 127.0.0.1:8001

clean: ## what tools have cached; runs and environments stay
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
