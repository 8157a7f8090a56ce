"""The flows: the names and habits of five earlier ways of quantizing a model, each a thin package over the engine."""
