"""The FX graph mode flow: `prepare_fx`, `convert_fx` and what belongs to them."""
