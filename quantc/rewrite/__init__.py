"""Building blocks of passes: normal forms, functionalization, folding, replacement."""
