"""OpenAI-compatible server of models by name; see docs/serve.md."""
