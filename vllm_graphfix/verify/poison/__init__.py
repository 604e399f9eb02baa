"""Poison: what must not matter to a step's requests is filled with what would be seen, before the step is prepared."""
