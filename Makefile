# The few commands of this project. `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup train test test-full mutants clean

# By default rustup looks for absent components in every cargo call and fails without a network. Only setup may install.
auto_install := $(if $(RUSTUP_AUTO_INSTALL),RUSTUP_AUTO_INSTALL=$(RUSTUP_AUTO_INSTALL),-u RUSTUP_AUTO_INSTALL)
export RUSTUP_AUTO_INSTALL := 0

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what the build needs and fetch the crates; silent when nothing is missing
	@env $(auto_install) scripts/setup

train: setup ## build onebox and train the quickstart model
	@cargo build --release --locked --bin onebox
	@"$${CARGO_TARGET_DIR:-target}/release/onebox" train configs/quickstart.ron

# A test often waits for a process or a file, so there are twice as many tests at a time as cores.
test: ## every test, then formatting and lints
	@env $(auto_install) scripts/setup tests
	@RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(( 2 * $$(nproc) ))} cargo test --workspace --locked --offline
	@if cargo fmt --version >/dev/null 2>&1; then \
		cargo fmt --all --check; \
	else \
		echo 'make test: rustfmt is not installed, so formatting was not checked (rustup component add rustfmt)' >&2; \
		[ "$${CI:-}" != true ]; \
	fi
	@if cargo clippy --version >/dev/null 2>&1; then \
		cargo clippy --workspace --all-targets --locked --offline -- -D warnings; \
	else \
		echo 'make test: clippy is not installed, so lints were not checked (rustup component add clippy)' >&2; \
		[ "$${CI:-}" != true ]; \
	fi

test-full: ## the same with every size and layout (ONEBOX_FULL=1), documentation, races, MPICH, Slurm, Arm, a real model, exports
	@ONEBOX_FULL=1 $(MAKE) --no-print-directory test
	@RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked --offline --quiet
	@scripts/check-races --or-skip
	@scripts/check-mpich --or-skip
	@scripts/check-slurm --or-skip
	@scripts/check-arm --or-skip
	@scripts/check-smollm2 --or-skip
	@scripts/check-transformers --or-skip

mutants: ## break the code on purpose and see that a test notices; SHARD=2/8: a part; again: what is left
	@env $(auto_install) scripts/setup tests
	@scripts/mutants $(if $(SHARD),--shard $(SHARD))

clean: ## remove what cargo built; runs/ stays
	@cargo clean
