"""Tests of the planning part."""
