"""The text form of programs: printer, parser, digests and diffs."""
