"""The ops of `torch.ops.quantc`: a reference each, and a faster kernel where there is one."""
