"""How matches of the Q/DQ form are written with integer ops, one family of ops a module."""
