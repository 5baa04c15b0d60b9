"""Tests of the command ``tiercache``."""
