"""Models, a tokenizer and texts for runs of trainers, all made here."""

import pydoc_data.topics
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.support.heap import small_heap  # noqa: F401
from tests.support.models import save_tiny


VOCABULARY = 512
SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")
#: Marks what the assistant says, its end of turn included, for `assistant_only_loss`.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}</s>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of 512 tokens, trained on Python's own documentation, with a chat template."""
    bpe = ByteLevelBPETokenizer()
    texts = list(pydoc_data.topics.topics.values())
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
    pad, bos, eos = SPECIAL[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def text_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints of two families with the vocabulary of `tokenizer`; read only."""
    root = tmp_path_factory.mktemp("text")
    return {f: save_tiny(root / f, f, vocab_size=VOCABULARY) for f in ("qwen3_moe", "gpt_oss")}
