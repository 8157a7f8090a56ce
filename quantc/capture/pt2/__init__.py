"""Exported programs in `.pt2` archives: read and checked without executing anything in them."""
