"""The Q/DQ form: its ops, and their insertion by the plan."""
