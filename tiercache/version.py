"""The version of tiercache."""

__version__ = "0.1.0"
