"""llama.cpp as an arm: a Mixtral checkpoint as GGUF with 4-bit matrices, and decoding with it in another interpreter.

`llama-cpp-python` is compiled when it is installed, for minutes; `make llama` does that in an environment of its own,
beside this one's. Where it is absent, the arm is left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel


#: Names the interpreter that has llama_cpp; what `make llama` makes if it is not set.
VARIABLE = "HF_QMOE_BENCH_LLAMA_PYTHON"
_SCRIPT = Path(__file__).with_name("llama_decode.py")
_Q4 = GGMLQuantizationType.Q4_0  # blocks of 32: SmolLM2's 576 columns are no multiple of the 256 that Q4_K needs


def interpreter() -> Path | None:
    """The Python that has llama_cpp, if there is one."""
    default = Path(sys.prefix) / "llama" / "bin" / "python"
    path = Path(os.environ.get(VARIABLE) or default)
    return path if path.exists() else None


def export(checkpoint: Path, path: Path) -> PreTrainedModel:
    """Writes the Mixtral model in `checkpoint` to `path`; returns it in float32 with the values that were written.

    Experts and attention are in Q4_0; embeddings, which are the output head too, in bf16 as in the other arms.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    assert isinstance(config, MixtralConfig)
    writer = GGUFWriter(path, "llama")
    _write_shapes(writer, config)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = "output.weight"
    for layer in range(config.num_hidden_layers):
        names |= _names_of_layer(layer)
    parameters = dict(model.named_parameters())
    for name, target in names.items():
        written = _write(writer, target, parameters[name].data, config)
        parameters[name].data.copy_(written)
    for layer in range(config.num_hidden_layers):
        stack = parameters[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        halves = zip(("gate", "up"), stack.data.chunk(2, dim=1), strict=True)
        stack.data.copy_(
            torch.cat([_write(writer, f"blk.{layer}.ffn_{n}_exps.weight", w, config) for n, w in halves], 1)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def _write_shapes(writer: GGUFWriter, config: MixtralConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim or config.hidden_size // config.num_attention_heads)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _names_of_layer(layer: int) -> dict[str, str]:
    ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate": "ffn_gate_inp",
    }
    matrices = {f"{ours}{name}.weight": f"{theirs}{target}.weight" for name, target in names.items()}
    return matrices | {f"{ours}mlp.experts.down_proj": f"{theirs}ffn_down_exps.weight"}


def _write(writer: GGUFWriter, target: str, weight: Tensor, config: MixtralConfig) -> Tensor:
    """Adds a tensor, and returns its values as they are stored, in the layout of `weight`."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    kind = target.split(".")[-2]
    rows = _interleaved(weight, heads[kind]) if kind in heads else weight
    if kind in ("token_embd", "output"):
        stored = GGMLQuantizationType.BF16
    elif kind.endswith(("_norm", "_inp")):
        stored = GGMLQuantizationType.F32
    else:
        stored = _Q4
    data = quants.quantize(rows.numpy(), stored)
    writer.add_tensor(target, data, raw_dtype=stored)
    values = torch.from_numpy(quants.dequantize(data, stored)).view(rows.shape)
    return _halves(values, heads[kind]) if kind in heads else values


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """transformers rotates the first half of a head against the second; llama.cpp rotates neighbours."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Undoes `_interleaved`."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


class Decoder:
    """A process that has the model loaded and decodes when it is told to: a line of JSON in, a line out."""

    def __init__(self, python: Path, model: Path, threads: int) -> None:
        command = [str(python), "-I", str(_SCRIPT), str(model), str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> Any:
        """Sends `request`, returns the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
