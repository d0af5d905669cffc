"""vLLM as an optional engine.

Nothing is imported from vLLM before it is started (`launch`); code that depends on its internals is
in `extension`.
"""
