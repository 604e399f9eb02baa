"""Poison: memory that belongs to no request of a step, filled before the step with values that would show."""
