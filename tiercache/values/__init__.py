"""Frozen values that the parts of training pass to each other. They import no other package of tiercache."""
