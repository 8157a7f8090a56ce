"""The modules of the eager flow."""
