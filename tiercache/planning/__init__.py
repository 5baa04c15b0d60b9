"""Deciding, without moving anything: the schedule, next uses, and what every pass moves."""
