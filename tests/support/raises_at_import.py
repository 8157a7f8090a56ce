"""A module that does not import."""

raise ZeroDivisionError("the license has expired")
