"""Whether sums of integers can overflow: bounds from the weights and ranges there are, and what makes it impossible."""
