"""The command line, the acceptance benchmark and the demo."""

__version__ = "0.1.0"
