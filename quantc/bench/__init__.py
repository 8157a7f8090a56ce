"""`quantc bench`: benchmarks quantized models against other tools, in one run.

`models` has the models, `contenders` the ways to run them, `race` times them interleaved, `floor` times every op alone,
`chart` draws, and `quantc.cli.bench` is the command. Nothing here is imported by `import quantc`.
"""
