"""Tests of tiercache."""
