"""The eager flow: stubs, module swapping, one module at a time."""
