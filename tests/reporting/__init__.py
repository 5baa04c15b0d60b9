"""Tests of reports, progress and figures."""
