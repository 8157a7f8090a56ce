"""The PT2 export flow: `prepare_pt2e`, `convert_pt2e`, and quantizers that annotate exported graphs."""
