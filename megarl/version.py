"""The version of megarl, which setup.py reads too."""

__version__ = "0.2.0"
