"""Verification of programs: IR invariants, schemas, finite constants."""
