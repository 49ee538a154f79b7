"""From a checkpoint that another method has quantized to packed experts, as transformers reads the shards.

Experts and linears are dequantized one at a time and packed as those of a float checkpoint are. Bytes of bitsandbytes
are kept: there the converters only put them where they belong.
"""
