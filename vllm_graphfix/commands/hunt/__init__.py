"""Hunts for defects of CUDA graphs: twins of every architecture, under flags in all pairs, judged as `compare` does."""
