"""The mixture of agents at the command line: a chat, one question, or a part of a pipe."""
