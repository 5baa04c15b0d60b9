"""Training stacks of other projects, each by its real package: make test-stacks."""
