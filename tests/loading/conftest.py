"""Checkpoints shared by the loading tests; read only."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import load
from tests.support.models import FAMILIES, VOCAB, save_tiny, tiny_model


@pytest.fixture(scope="session")
def fused_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe saved in the layout of the model in memory, one tensor per stack."""
    path = tmp_path_factory.mktemp("fused")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(path, save_original_format=False)
    return path


@pytest.fixture(scope="session")
def sharded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe in the original layout, in shards of at most 30 KB."""
    path = tmp_path_factory.mktemp("sharded")
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(path, max_shard_size="30KB")
    return path


@pytest.fixture(scope="session")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts."""
    path = tmp_path_factory.mktemp("dense")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def packed_checkpoints(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family packed with the defaults and saved."""
    root = tmp_path_factory.mktemp("packed")
    for family in FAMILIES:
        load(tiny_checkpoints[family], QMoEConfig()).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def odd_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe whose down projection has an odd number of input features."""
    return save_tiny(tmp_path_factory.mktemp("odd"), "qwen3_moe", moe_intermediate_size=33)


@pytest.fixture(scope="session")
def indivisible_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Experts of 20 x 20 and 20 x 10 weights, which no block size divides."""
    root = tmp_path_factory.mktemp("indivisible")
    shape = {"hidden_size": 20, "head_dim": 16}
    return {
        "qwen3_moe": save_tiny(root / "qwen3_moe", "qwen3_moe", **shape, moe_intermediate_size=10),
        "gpt_oss": save_tiny(root / "gpt_oss", "gpt_oss", **shape, intermediate_size=10),
    }
