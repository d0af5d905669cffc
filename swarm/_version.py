"""The version of the package; in a separate module to avoid importing the package."""

__version__ = "0.1.0"
