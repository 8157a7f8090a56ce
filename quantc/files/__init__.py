"""File access: atomic writes, digests against damage, and checks of files before they are read or replaced."""
