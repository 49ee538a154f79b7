"""Checkpoints that are quantized already, by others: what their tensors mean.

`tensors` reads them as they are stored, one module per method says what they stand for, `merge` decides from a
``config.json`` which method it is. Putting them into a model is `hf_qmoe.requantize`.
"""
