"""The ops of `torch.ops.quantc`: a reference for each, and a faster kernel where there is one."""
