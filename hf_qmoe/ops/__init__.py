"""Tensors in, tensors out: storage formats and the operators on packed weights.

Only torch and bitsandbytes are imported below this package; see ``docs/design.md`` for the layers.
"""
