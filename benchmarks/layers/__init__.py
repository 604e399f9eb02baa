"""Layers of fixes that stay on the path of a decode step: a module has the `RELEASE` it is measured with, and `measure`, run in its process."""
