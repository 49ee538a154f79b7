"""A tiny Mixture-of-Experts checkpoint with a tokenizer, made on the spot: the examples need no download."""

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM


VOCAB_SIZE = 512
EOS_TOKEN = "<|endoftext|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens, trained on Python's own help texts; it can encode any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(topics.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN)


def make_config() -> Qwen3MoeConfig:
    """Two Qwen3-MoE layers with four experts each, two of them per token: 0.24 M parameters."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        moe_intermediate_size=96,  # not a multiple of the block size 64: blocks then run on from row to row
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=0,
    )


def create_tiny_model(folder: Path, seed: int = 0) -> None:
    """Writes the checkpoint (bf16, random weights) and the tokenizer, unless the folder exists.

    Args:
        folder: where to. It appears complete or not at all, even if this is interrupted.
        seed: of the weights; the global random state is left as it was.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        checkpoint = Path(unfinished) / folder.name
        Qwen3MoeForCausalLM(make_config()).to(torch.bfloat16).save_pretrained(checkpoint)
        make_tokenizer().save_pretrained(checkpoint)
        checkpoint.rename(folder)
