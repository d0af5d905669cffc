"""Command line of the mixture of agents: a chat, a single question, or a part of a pipe."""
