"""Tests of extraction and pass sets."""
