"""The demo: late flights over three tiers, with what it promises checked. `python -m examples.flights` runs it."""
