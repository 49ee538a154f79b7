"""Writing a packed checkpoint in the layouts of others.

`checkpoint` writes what `plan` has planned, tensor by tensor: `names` says what tensors were called originally,
`stacks` cuts packed stacks into experts' matrices, `bitsandbytes` and `config` describe them as transformers v4 did,
`writer` puts files together. No model is loaded, and no weight unpacked.
"""
