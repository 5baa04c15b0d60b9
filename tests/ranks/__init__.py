"""Tests of training on several ranks."""
