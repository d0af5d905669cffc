"""Consortia by name and by the llm command: what is asked of one, its runs, and its saved ones."""
