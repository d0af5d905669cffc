"""An OpenAI-compatible server: whatever has a name here is a model there; docs/serve.md."""
