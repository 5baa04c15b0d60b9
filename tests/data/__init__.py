"""Tests of extraction and datasets."""
