"""Trials of fixes: one module for each fix, of the same name, with a `TRIAL`."""
