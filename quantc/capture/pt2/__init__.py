"""Exported programs in `.pt2` archives: read and checked without running anything they hold."""
