"""`quantc bench`: quantized models beside other tools, in one run.

`models` has the models, `contenders` what is made of them, `race` lets all take turns, `floor` times every op alone,
`plot` draws, and `command` is the command line. Nothing here is imported by `import quantc`.
"""
