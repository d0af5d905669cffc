"""The version of the package; a module alone, so that no other has to import the package."""

__version__ = "0.1.0"
