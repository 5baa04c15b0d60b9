"""Tests of training: parity, crashes, evaluation."""
