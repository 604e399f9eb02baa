"""What each fix is tried with: one module a fix, of the same name, each with a `TRIAL`."""
