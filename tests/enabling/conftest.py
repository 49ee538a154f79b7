"""Checkpoints for these tests; read only."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import load
from tests.support.models import VOCAB


@pytest.fixture(scope="session")
def dense_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts."""
    path = tmp_path_factory.mktemp("dense")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def packed_checkpoint(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model packed and saved."""
    path = tmp_path_factory.mktemp("packed")
    load(tiny_checkpoints["qwen3_moe"], QMoEConfig()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    vocabulary = {letter: index for index, letter in enumerate("?abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?")
