"""What was done to a program, and how well: coverage, explanations, comparison with the float program, size."""
