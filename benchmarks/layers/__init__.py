"""Layers of fixes that stay on the path of a decode step.

Each module has the `RELEASE` that it is measured with, and `measure`, which runs in its process.
"""
