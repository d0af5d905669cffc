"""Consortia for the llm command and Python: questions, recorded runs, and saved consortia."""
