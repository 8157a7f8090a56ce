"""Saved programs: `program.save(path)` and `qc.load(path)`."""

from quantc.store.programs import load, save

__all__ = ["load", "save"]
