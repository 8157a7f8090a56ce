"""Helpers that know nothing of programs: validation, optional dependencies, progress, equivalence classes."""
