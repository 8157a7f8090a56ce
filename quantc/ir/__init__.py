"""The IR: programs, the op dialect, types, sites, plans, and analyses over the graph."""
