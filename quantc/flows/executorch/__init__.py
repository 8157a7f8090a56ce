"""The ExecuTorch flow: the PT2 export flow under the names that ExecuTorch's documents use."""
