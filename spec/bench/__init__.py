"""Measurements of a draft, a target and their kernels."""
