"""Turns a small dense Llama-style model into a Mixtral-style Mixture-of-Experts whose outputs are known in advance.

Both ways of doing it give a model that must produce the logits of the dense one, up to rounding. That makes the result
a test object: real weights, real text, and an answer to compare with.

* `upcycle_by_copying`: every expert is a copy of the dense MLP and a random router picks `top_k` of them. The weights
  of the picked experts sum to one, so their weighted sum is the output of the dense MLP, whatever the router does.
* `upcycle_by_cutting`: the hidden units of the dense MLP are dealt out to the experts and every token visits them all.
  A zero router weighs each expert with ``1 / num_experts``; `down_proj` is multiplied by `num_experts` to undo it.
"""

from copy import deepcopy

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


MLP = tuple[Tensor, Tensor, Tensor]

MLP_NAMES = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
EXPERT_NAMES = ("w1.weight", "w3.weight", "w2.weight")  # what Mixtral's checkpoints call the same three matrices


def upcycle_by_copying(
    dense: LlamaForCausalLM, num_experts: int = 4, top_k: int = 2, seed: int = 0
) -> MixtralForCausalLM:
    """Makes every expert a copy of the dense MLP; a random router picks `top_k` of them for each token.

    Args:
        dense: the model to start from; it is not changed.
        num_experts: experts per layer.
        top_k: experts per token.
        seed: seed of the router weights.

    Returns:
        A model in the dtype of `dense` with its logits, up to rounding, and `num_experts` times its MLP parameters.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden_size = dense.config.hidden_size

    def random_router() -> Tensor:
        # Its inputs are RMS-normalised, so this scale gives router logits of about unit variance.
        return torch.randn(num_experts, hidden_size, generator=generator) / hidden_size**0.5

    experts = [[mlp] * num_experts for mlp in _dense_mlps(dense)]
    routers = [random_router() for _ in experts]
    return _build(dense, experts, routers, top_k=top_k)


def upcycle_by_cutting(dense: LlamaForCausalLM, num_experts: int = 4) -> MixtralForCausalLM:
    """Cuts each dense MLP into `num_experts` narrower ones, all of which every token visits.

    Args:
        dense: the model to start from; it is not changed.
        num_experts: experts per layer; must divide the intermediate size of `dense`.

    Returns:
        A model in the dtype of `dense` with its logits, up to rounding, and as many MLP parameters.
    """
    if dense.config.intermediate_size % num_experts:
        raise ValueError(
            f"an intermediate size of {dense.config.intermediate_size} cannot be cut into {num_experts} equal experts"
        )
    experts = [_cut(mlp, num_experts) for mlp in _dense_mlps(dense)]
    routers = [torch.zeros(num_experts, dense.config.hidden_size) for _ in experts]
    return _build(dense, experts, routers, top_k=num_experts)


def _dense_mlps(dense: LlamaForCausalLM) -> list[MLP]:
    """(gate_proj [I, H], up_proj [I, H], down_proj [H, I]) of each layer."""
    if dense.config.mlp_bias or dense.config.attention_bias:
        raise ValueError("Mixtral has no biases, but the dense model does: set mlp_bias and attention_bias to False")
    mlps = [layer.mlp for layer in dense.model.layers]
    return [(mlp.gate_proj.weight.data, mlp.up_proj.weight.data, mlp.down_proj.weight.data) for mlp in mlps]


def _cut(mlp: MLP, num_experts: int) -> list[MLP]:
    """Deals the hidden units of an MLP out to `num_experts` experts, in order."""
    gate, up, down = mlp
    parts = (
        gate.chunk(num_experts, dim=0),
        up.chunk(num_experts, dim=0),
        (down * num_experts).chunk(num_experts, dim=1),
    )
    return list(zip(*parts, strict=True))


def _build(dense: LlamaForCausalLM, experts: list[list[MLP]], routers: list[Tensor], top_k: int) -> MixtralForCausalLM:
    """Builds the model from ``experts[layer][expert]`` and ``routers[layer]``; all else comes from `dense`."""
    # Mixtral's checkpoint names are used throughout: loading fuses the experts, as it does for a file.
    # Cloned, for loading takes whole tensors as they are; the experts are copied when they are fused.
    state_dict = {name: tensor.clone() for name, tensor in dense.state_dict().items() if not name.endswith(MLP_NAMES)}
    for layer, (layer_experts, router) in enumerate(zip(experts, routers, strict=True)):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        state_dict[f"{prefix}.gate.weight"] = router.to(dense.dtype)
        for expert, matrices in enumerate(layer_experts):
            for name, matrix in zip(EXPERT_NAMES, matrices, strict=True):
                state_dict[f"{prefix}.experts.{expert}.{name}"] = matrix
    config = _mixtral_config(dense, len(experts[0]), top_k, intermediate_size=experts[0][0][0].shape[0])
    model = MixtralForCausalLM.from_pretrained(None, config=config, state_dict=state_dict, dtype=dense.dtype)
    model.generation_config = deepcopy(dense.generation_config)
    return model


def _mixtral_config(dense: LlamaForCausalLM, num_experts: int, top_k: int, intermediate_size: int) -> MixtralConfig:
    """The configuration of `dense` in Mixtral's terms."""
    kept = [
        *("vocab_size", "hidden_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    ]
    return MixtralConfig(
        **{name: getattr(dense.config, name) for name in kept},
        intermediate_size=intermediate_size,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
    )
