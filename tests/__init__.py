"""The tests by what they need: docs/architecture.md says which folder holds what."""
